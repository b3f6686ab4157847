// LangChain.js over chat completions, Responses and Messages: models, agents, streams, zod types.
import assert from 'node:assert/strict'
import { ChatAnthropic } from '@langchain/anthropic'
import { ChatOpenAI } from '@langchain/openai'
import { createAgent, tool } from 'langchain'
import { z } from 'zod'
import * as steps from './steps.mjs'

const weather = tool(async ({ city }) => `sunny in ${city}`, {
  name: 'weather', description: 'The weather of a city.', schema: z.object({ city: z.string() }),
})
const person = z.object({ who: z.string(), age: z.number().int() })
const openai = (more) => (apiKey = steps.key) =>
  new ChatOpenAI({ model: 'tiny', apiKey, maxRetries: 0, configuration: { baseURL: `${steps.url}/v1` }, ...more })
const anthropic = (apiKey = steps.key) => new ChatAnthropic({ model: 'tiny', apiKey, anthropicApiUrl: steps.url, maxRetries: 0, maxTokens: 4096 })

const of = (make) => {
  const agent = (more = {}) => createAgent({ model: make(), tools: [weather], ...more })
  const ask = async (content) => (await agent().invoke({ messages: [{ role: 'user', content }] })).messages
  const read = async (text) => {
    let found = ''
    for await (const piece of await make().stream(text)) found += piece.text
    return found
  }
  return {
    turn: async () => assert.equal((await make().invoke(steps.hello)).text, 'Hello there.'),
    stream: async () => assert.equal(await read(steps.hello), 'Hello there.'),
    tools: async () => assert.equal((await ask(steps.call)).at(-1).text, steps.said),
    'streamed tools': async () => {
      let found = ''
      const stream = await agent().stream({ messages: [{ role: 'user', content: steps.call }] }, { streamMode: 'messages' })
      for await (const [piece] of stream) if (piece.getType() === 'ai') found += piece.text
      assert.equal(found, steps.said)
    },
    JSON: async () => {
      if (make !== anthropic) {
        assert.deepEqual(await make().withStructuredOutput(person, { method: 'jsonSchema' }).invoke(steps.json), steps.ada)
      }
      const call = '<<<tool_call>{"name": "extract", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'
      assert.deepEqual(await make().withStructuredOutput(person, { name: 'extract', method: 'functionCalling' }).invoke(call), steps.ada)
    },
    'second turn': async () => {
      const messages = [...(await ask(steps.call)), { role: 'user', content: steps.again }]
      assert.equal((await agent().invoke({ messages })).messages.at(-1).text, 'It goes on.')
    },
    'cut stream': () => steps.fails(read(steps.cut)),
    'wrong key': () => steps.fails(make('sk-wrong').invoke('hi'), 'Incorrect API key'),
    'too long': () => steps.fails(make().invoke(steps.long), '400'),
  }
}

await steps.run({ chat: of(openai()), responses: of(openai({ useResponsesApi: true })), messages: of(anthropic) })
