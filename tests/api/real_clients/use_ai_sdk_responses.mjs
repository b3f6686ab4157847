// The Vercel AI SDK through its OpenAI provider, which speaks Responses and sends later turns as references to items.
import assert from 'node:assert/strict'
import { createOpenAI } from '@ai-sdk/openai'
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai'

const bodies = []
const recording = async (url, init) => {
  bodies.push(JSON.parse(init.body))
  return fetch(url, init)
}
const model = createOpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: process.env.ACME, fetch: recording })('tiny')
const tools = {
  now: tool({
    description: 'the time',
    inputSchema: jsonSchema({ type: 'object', properties: { zone: { type: 'string' } }, additionalProperties: false }),
    execute: async () => 'halkodel-4711',
  }),
}
const options = { model, tools, maxRetries: 0, stopWhen: stepCountIs(3) }
const messages = [{ role: 'user', content: 'What time is it?' }]

const first = await generateText({ ...options, messages })
assert.equal(first.steps.length, 2)
assert.equal(first.text, 'It is halkodel-4711.')
const types = bodies[1].input.map((item) => item.type)
assert.ok(types.includes('item_reference'), JSON.stringify(bodies[1].input))

messages.push(...first.response.messages, { role: 'user', content: 'Say it again.' })
const second = streamText({ ...options, messages })
let text = ''
for await (const part of second.textStream) text += part
assert.equal(text, 'It is halkodel-4711.')
assert.ok(bodies[2].input.filter((item) => item.type === 'item_reference').length >= 2, JSON.stringify(bodies[2].input))

const id = (await second.providerMetadata).openai.responseId
const third = await generateText({ ...options, prompt: 'And again.', providerOptions: { openai: { previousResponseId: id } } })
assert.equal(third.text, 'It is halkodel-4711.')
assert.equal(bodies.at(-1).previous_response_id, id)
console.log('ok')
