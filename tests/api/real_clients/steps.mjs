// Steps that a client is put through, as steps.py: each is a function, and the results are printed as one line of JSON.
import assert from 'node:assert/strict'

export const { URL: url, KEY: key } = process.env
export const hello = 'Say <<Hello there.>>'
export const call = 'Use it: <<<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>>>'
export const said = 'It says sunny in Paris'
export const json = 'Answer as JSON: <<{"who": "Ada", "age": 36}>>'
export const ada = { who: 'Ada', age: 36 }
export const again = 'And now <<It goes on.>>'
export const cut = 'Say <<cut:Hello th>>'
export const long = 'x'.repeat(500_000)

export const fails = async (work, ...words) => {
  const error = await work.then(() => null, (error) => error)
  assert.ok(error, 'no error')
  const text = `${error.name}: ${error.message} ${JSON.stringify(error)}`
  for (const word of words) assert.ok(text.includes(word), `${word} not in ${text.slice(0, 300)}`)
}

export const run = async (apis) => {
  const results = {}
  for (const [api, steps] of Object.entries(apis)) {
    results[api] = {}
    for (const [name, step] of Object.entries(steps)) {
      results[api][name] = await step().then(() => 'ok', (error) => `${error.name}: ${error.message}`.slice(0, 1200))
    }
  }
  console.log('\n' + JSON.stringify(results))
  process.exit(0) // some clients keep a connection
}
