// The OpenAI Agents SDK for JavaScript over chat completions and Responses.
import assert from 'node:assert/strict'
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from '@openai/agents'
import OpenAI from 'openai'
import { z } from 'zod'
import * as steps from './steps.mjs'

setTracingDisabled(true)
const weather = tool({
  name: 'weather', description: 'The weather of a city.', parameters: z.object({ city: z.string() }), execute: async ({ city }) => `sunny in ${city}`,
})
const person = z.object({ who: z.string(), age: z.number().int() })

const of = (Model) => {
  const agent = (more = {}, apiKey = steps.key) => {
    const client = new OpenAI({ baseURL: `${steps.url}/v1`, apiKey, maxRetries: 0 })
    return new Agent({ name: 'helper', instructions: 'Help.', model: new Model(client, 'tiny'), modelSettings: { store: false }, ...more })
  }
  const ask = async (text, more, apiKey) => (await run(agent(more, apiKey), text)).finalOutput
  const streamed = async (text, more) => {
    const result = await run(agent(more), text, { stream: true })
    for await (const _ of result);
    await result.completed
    if (result.error) throw result.error
    return result.finalOutput
  }
  const tools = { tools: [weather] }
  return {
    turn: async () => assert.equal(await ask(steps.hello), 'Hello there.'),
    stream: async () => assert.equal(await streamed(steps.hello), 'Hello there.'),
    tools: async () => assert.equal(await ask(steps.call, tools), steps.said),
    'streamed tools': async () => assert.equal(await streamed(steps.call, tools), steps.said),
    JSON: async () => assert.deepEqual(await ask(steps.json, { outputType: person }), steps.ada),
    'second turn': async () => {
      const first = await run(agent(tools), steps.call)
      const turns = [...first.history, { role: 'user', content: steps.again }]
      assert.equal(await ask(turns, tools), 'It goes on.')
    },
    'cut stream': () => steps.fails(streamed(steps.cut)),
    'wrong key': () => steps.fails(ask('hi', {}, 'sk-wrong'), 'Incorrect API key'),
    'too long': () => steps.fails(ask(steps.long), '400'),
  }
}

await steps.run({ chat: of(OpenAIChatCompletionsModel), responses: of(OpenAIResponsesModel) })
