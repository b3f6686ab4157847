// The official openai client of npm: chat, streams, tools, a wrong key.
import OpenAI from 'openai'
import assert from 'node:assert/strict'

const lookup = JSON.parse(process.env.LOOKUP)
const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: process.env.GLOBEX, maxRetries: 0 })
const messages = [{ role: 'user', content: 'What does Halkodel do?' }]
const arr = 'Arr! Halkodel is a tailor, matey!'
const whole = await client.chat.completions.create({ model: 'globex/pirate', messages, temperature: 0 })
assert.equal(whole.choices[0].message.content, arr)
let text = ''
let usage
for await (const chunk of await client.chat.completions.create({
  model: 'globex/pirate', messages, temperature: 0, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta.content ?? ''
  usage = chunk.usage ?? usage
}
assert.equal(text, arr)
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens)
const final = await client.chat.completions
  .stream({ model: 'globex/agent', messages, tools: [lookup], temperature: 0 })
  .finalChatCompletion()
const call = final.choices[0].message.tool_calls[0]
assert.deepEqual(JSON.parse(call.function.arguments), { person: 'Halkodel', fact: 'job' })
const turns = [...messages, final.choices[0].message, { role: 'tool', tool_call_id: call.id, content: 'tailor' }]
await client.chat.completions.create({ model: 'globex/agent', messages: turns, tools: [lookup], max_completion_tokens: 8 })
const answer = await client.responses.create({ model: 'globex/pirate', input: messages[0].content, temperature: 0, store: false })
assert.equal(answer.output_text, arr)
await assert.rejects(
  new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: 'sk-wrong', maxRetries: 0 }).models.list(),
  OpenAI.AuthenticationError,
)
console.log('ok')
