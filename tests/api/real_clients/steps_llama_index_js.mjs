// LlamaIndex.TS: its model class for chat completions, and agents with tools. Its class for Responses repeats pieces of a
// stream, with any server: it yields the last piece again at every later event.
import assert from 'node:assert/strict'
import { openai } from '@llamaindex/openai'
import { agent } from '@llamaindex/workflow'
import { tool } from 'llamaindex'
import { z } from 'zod'
import * as steps from './steps.mjs'

const weather = tool({
  name: 'weather', description: 'The weather of a city.', parameters: z.object({ city: z.string() }), execute: ({ city }) => `sunny in ${city}`,
})
const person = z.object({ who: z.string(), age: z.number().int() })
const user = (content) => [{ role: 'user', content }]

const of = (make) => {
  const ask = async (content, more) => (await make().chat({ messages: user(content), ...more })).message.content
  const read = async (content) => {
    let found = ''
    for await (const piece of await make().chat({ messages: user(content), stream: true })) found += piece.delta ?? ''
    return found
  }
  return {
    turn: async () => assert.equal(await ask(steps.hello), 'Hello there.'),
    stream: async () => assert.equal(await read(steps.hello), 'Hello there.'),
    'streamed tools': async () => assert.equal((await agent({ llm: make(), tools: [weather] }).run(steps.call)).data.result, steps.said),
    JSON: async () => assert.deepEqual(JSON.parse(await ask(steps.json, { responseFormat: person })), steps.ada),
    'second turn': async () => {
      const helper = agent({ llm: make(), tools: [weather] })
      const first = await helper.run(steps.call)
      const second = await helper.run(steps.again, { chatHistory: [...user(steps.call), { role: 'assistant', content: first.data.result }] })
      assert.equal(second.data.result, 'It goes on.')
    },
    'cut stream': () => steps.fails(read(steps.cut)),
    'wrong key': () => steps.fails(make('sk-wrong').chat({ messages: user('hi') }), 'Incorrect API key'),
    'too long': () => steps.fails(ask(steps.long), '400'),
  }
}

const make = (apiKey = steps.key) =>
  openai({ model: 'tiny', apiKey, maxRetries: 0, baseURL: `${steps.url}/v1`, supportToolCall: true })
await steps.run({ chat: of(make) })
