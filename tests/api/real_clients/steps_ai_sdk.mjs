// The Vercel AI SDK through its three providers, with zod 4: text, streams, tools in two steps, objects, histories.
import assert from 'node:assert/strict'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const { URL: url, KEY: key } = process.env
const providers = {
  chat: (apiKey) =>
    createOpenAICompatible({ name: 'loramux', baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true })('tiny'),
  'openai chat': (apiKey) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).chat('tiny'),
  responses: (apiKey) => createOpenAI({ baseURL: `${url}/v1`, apiKey })('tiny'),
  messages: (apiKey) => createAnthropic({ baseURL: `${url}/v1`, apiKey })('tiny'),
}
const hello = 'Say <<Hello there.>>'
const call = 'Use it: <<<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>>>'
const said = 'It says sunny in Paris'
const tools = {
  weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string().min(1), on: z.iso.date().optional(), more: z.record(z.string(), z.any()).optional() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
}
const person = z.object({ who: z.string(), age: z.number().int().positive(), mail: z.email().optional() })

const steps = (make) => {
  // Without a memory, items are sent in full: `store` is OpenAI's own default.
  const shared = (apiKey = key) => ({
    model: make(apiKey), maxRetries: 0, stopWhen: stepCountIs(3), maxOutputTokens: 4096, providerOptions: { openai: { store: false } },
  })
  const read = async (options) => {
    let text = ''
    const failed = []
    const stream = streamText({ ...shared(), onError: ({ error }) => failed.push(error), ...options })
    for await (const piece of stream.textStream) text += piece
    if (failed.length) throw failed[0]
    assert.ok((await stream.usage).outputTokens > 0)
    return text
  }
  return {
    turn: async () => assert.equal((await generateText({ ...shared(), prompt: hello })).text, 'Hello there.'),
    stream: async () => assert.equal(await read({ prompt: hello }), 'Hello there.'),
    tools: async () => assert.equal((await generateText({ ...shared(), tools, prompt: call })).text, said),
    'streamed tools': async () => assert.ok((await read({ tools, prompt: call })).endsWith(said)),
    JSON: async () => {
      const output = Output.object({ schema: person })
      const found = await generateText({ ...shared(), output, prompt: 'Answer as JSON: <<{"who": "Ada", "age": 36}>>' })
      assert.deepEqual(found.output, { who: 'Ada', age: 36 })
    },
    'second turn': async () => {
      const messages = [{ role: 'user', content: call }]
      const first = await generateText({ ...shared(), tools, messages })
      messages.push(...first.response.messages, { role: 'user', content: 'And now <<<think>so</think>It goes on.>>' })
      const second = await generateText({ ...shared(), tools, messages })
      assert.equal(second.text, 'It goes on.')
      messages.push(...second.response.messages, { role: 'user', content: hello })
      assert.equal(await read({ tools, messages }), 'Hello there.')
    },
    'cut stream': async () => assert.rejects(read({ prompt: 'Say <<cut:Hello th>>' })),
    busy: async () =>
      assert.equal((await generateText({ ...shared(), maxRetries: 2, prompt: `Say <<busy:Here again.>> ${url}` })).text, 'Here again.'),
    'wrong key': async () => assert.rejects(generateText({ ...shared('sk-wrong'), prompt: 'hi' }), { statusCode: 401 }),
    'too long': async () => assert.rejects(generateText({ ...shared(), prompt: 'x'.repeat(500_000) }), { statusCode: 400 }),
  }
}

const results = {}
for (const [api, make] of Object.entries(providers)) {
  results[api] = {}
  for (const [name, step] of Object.entries(steps(make))) {
    results[api][name] = await step().then(() => 'ok', (error) => `${error.name}: ${error.message}`.slice(0, 1200))
  }
}
console.log('\n' + JSON.stringify(results))
