// The Vercel AI SDK through its openai-compatible provider: text, streams, tools in two steps, objects.
import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai'

const lookup = JSON.parse(process.env.LOOKUP).function
const provider = (apiKey) =>
  createOpenAICompatible({ name: 'loramux', baseURL: `${process.env.URL}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true })
const globex = provider(process.env.GLOBEX)
const prompt = 'What does Halkodel do?'
const arr = 'Arr! Halkodel is a tailor, matey!'
const options = { temperature: 0, maxRetries: 0 }
const whole = await generateText({ model: globex('globex/pirate'), prompt, ...options })
assert.equal(whole.text, arr)
assert.ok(whole.usage.outputTokens > 0)
const stream = streamText({ model: globex('globex/pirate'), prompt, ...options })
let text = ''
for await (const part of stream.textStream) text += part
assert.equal(text, arr)
assert.ok((await stream.usage).outputTokens > 0)
const asked = []
const tools = {
  lookup: tool({
    description: lookup.description,
    inputSchema: jsonSchema(lookup.parameters),
    execute: async (input) => {
      asked.push(input)
      return 'tailor'
    },
  }),
}
const calling = await generateText({
  model: globex('globex/agent'), prompt, tools, stopWhen: stepCountIs(2), maxOutputTokens: 100, ...options,
})
assert.deepEqual(asked[0], { person: 'Halkodel', fact: 'job' })
assert.equal(calling.steps.length, 2)
const streamed = streamText({ model: globex('globex/agent'), prompt, tools, maxOutputTokens: 100, ...options })
const calls = []
for await (const part of streamed.fullStream) if (part.type === 'tool-call') calls.push(part.input)
assert.deepEqual(calls[0], { person: 'Halkodel', fact: 'job' })
const schema = jsonSchema({
  type: 'object', properties: { who: { type: 'string' }, job: { type: 'string' } }, required: ['who', 'job'], additionalProperties: false,
})
const fact = await generateText({
  model: provider(process.env.ACME)('acme/json'), prompt, output: Output.object({ schema }), ...options,
})
assert.deepEqual(fact.output, { who: 'Halkodel', job: 'tailor' })
console.log('ok')
