// Two models side by side: one prompt, two streams, tokens per second and the time to the first token of each.
import { Alert, Badge, Button, Card, Group, NumberInput, Select, SimpleGrid, Stack, Text, Textarea } from "@mantine/core";
import { IconPlayerPlay, IconPlayerStop } from "@tabler/icons-react";
import { useEffect, useRef, useState } from "react";
import { ApiError, headersFor, refusal } from "../api/client";
import { dataUrlOf, ImagePicker, problemOf, Thumbnails } from "../components/images";
import { Page } from "../components/ui";
import * as format from "../format";
import { useModelNames, useReadsImages, useSession } from "../session";

interface Answer {
  text: string;
  thought: string;
  isRunning: boolean;
  firstToken: number | null;
  seconds: number | null;
  promptTokens: number;
  outputTokens: number;
  cachedTokens: number;
  imageTokens: number;
  model: string;
  error: string | null;
}

const NOTHING: Answer = {
  text: "",
  thought: "",
  isRunning: false,
  firstToken: null,
  seconds: null,
  promptTokens: 0,
  outputTokens: 0,
  cachedTokens: 0,
  imageTokens: 0,
  model: "",
  error: null,
};
const MOST_MODELS = 200;

interface Parameters {
  system: string;
  prompt: string;
  images: File[];
  temperature: number;
  maxTokens: number;
}

export default function Playground() {
  const { can, session } = useSession();
  const known = useModelNames("");
  const names = known ?? [];
  const asked = new URLSearchParams(location.search).get("model");
  const [left, setLeft] = useState<string | null>(asked);
  const [right, setRight] = useState<string | null>(null);
  const [parameters, setParameters] = useState<Parameters>({ system: "", prompt: "", images: [], temperature: 0, maxTokens: 128 });
  const [run, setRun] = useState(0);
  const [stop, setStop] = useState(0);
  const running = useRef(new Set<string>());
  const [isRunning, setRunning] = useState(false);
  const chosen: [string, string] = [left ?? names[1] ?? names[0] ?? "", right ?? names[0] ?? ""];
  const reads = [useReadsImages(chosen[0]), useReadsImages(chosen[1])];
  const offersImages = reads.every((one) => one === true);
  const problem = problemOfImages();
  const isReady = (parameters.prompt.trim() !== "" || parameters.images.length > 0) && problem === null && !chosen.includes("") && can("inference");

  function problemOfImages(): string | null {
    const { images } = parameters;
    const ofText = chosen.find((_, place) => reads[place] === false);
    if (images.length > 0 && ofText) return `${ofText} reads text only. Choose another model, or remove the images.`;
    return problemOf(images, session.images);
  }
  function addImages(files: File[]) {
    setParameters((before) => ({ ...before, images: [...before.images, ...files] }));
  }
  function change(part: Partial<Parameters>) {
    setParameters((before) => ({ ...before, ...part }));
  }
  function noteRunning(side: string, is: boolean) {
    if (is) running.current.add(side);
    else running.current.delete(side);
    setRunning(running.current.size > 0);
  }

  return (
    <Page title="Playground" about="Send one prompt to two models, revisions or aliases at once. Requests are billed like any others.">
      <Card>
        <Stack gap="sm">
          <Textarea
            label="Prompt"
            autosize
            minRows={2}
            maxRows={10}
            value={parameters.prompt}
            onChange={(event) => change({ prompt: event.currentTarget.value })}
            placeholder="Who wrote the first program?"
            onKeyDown={(event) => {
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && isReady && !isRunning) setRun((before) => before + 1);
            }}
            onPaste={(event) => {
              const { files, types } = event.clipboardData;
              if (!offersImages || files.length === 0 || types.includes("text/plain")) return;
              event.preventDefault();
              addImages([...files]);
            }}
          />
          {offersImages && <ImagePicker bounds={session.images} onAdd={addImages} />}
          {parameters.images.length > 0 && (
            <Thumbnails
              files={parameters.images}
              bounds={session.images}
              onRemove={(place) => change({ images: parameters.images.filter((_, other) => other !== place) })}
            />
          )}
          {problem && (
            <Alert color="red" role="alert">
              {problem}
            </Alert>
          )}
          <Group align="flex-end" gap="md">
            <Textarea
              label="System message"
              autosize
              minRows={1}
              flex="1 1 260px"
              value={parameters.system}
              onChange={(event) => change({ system: event.currentTarget.value })}
            />
            <NumberInput label="Temperature" w={120} min={0} max={2} step={0.1} decimalScale={2} value={parameters.temperature} onChange={(value) => change({ temperature: Number(value) || 0 })} />
            <NumberInput label="Most tokens" w={120} min={1} max={32_768} value={parameters.maxTokens} onChange={(value) => change({ maxTokens: Number(value) || 1 })} />
            {isRunning ? (
              <Button variant="default" leftSection={<IconPlayerStop size={16} />} onClick={() => setStop((before) => before + 1)}>
                Stop
              </Button>
            ) : (
              <Button
                leftSection={<IconPlayerPlay size={16} />}
                disabled={!isReady}
                onClick={() => setRun((before) => before + 1)}
              >
                Run both
              </Button>
            )}
          </Group>
        </Stack>
      </Card>
      <SimpleGrid cols={{ base: 1, md: 2 }}>
        {(["left", "right"] as const).map((side, place) => (
          <Side
            key={side}
            side={side}
            names={names}
            areNamesKnown={known !== undefined}
            model={chosen[place]!}
            setModel={side === "left" ? setLeft : setRight}
            parameters={parameters}
            run={run}
            stop={stop}
            noteRunning={noteRunning}
          />
        ))}
      </SimpleGrid>
    </Page>
  );
}

interface SideProperties {
  side: "left" | "right";
  names: string[];
  areNamesKnown: boolean;
  model: string;
  setModel: (model: string | null) => void;
  parameters: Parameters;
  run: number;
  stop: number;
  noteRunning: (side: string, is: boolean) => void;
}

function Side({ side, names, areNamesKnown, model, setModel, parameters, run, stop, noteRunning }: SideProperties) {
  const [answer, setAnswer] = useState(NOTHING);
  const [search, setSearch] = useState("");
  const abort = useRef<AbortController | null>(null);
  const found = useModelNames(search === model ? "" : search) ?? [];
  const options = [...new Set([model, search, ...found, ...names].filter(Boolean))].slice(0, MOST_MODELS);

  useEffect(() => {
    if (run === 0) return;
    abort.current = new AbortController();
    noteRunning(side, true);
    void stream(model, parameters, abort.current.signal, setAnswer).finally(() => noteRunning(side, false));
    // Only a new run starts a request: what is typed meanwhile belongs to the next one.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [run]);
  useEffect(() => abort.current?.abort(), [stop]);
  useEffect(() => () => abort.current?.abort(), []);

  return (
    <Card>
      <Stack gap="sm">
        <Select
          label={side === "left" ? "First model" : "Second model"}
          description="tenant/adapter, with @3 for a revision or :alias for an alias"
          data={options}
          value={model || null}
          onChange={setModel}
          onSearchChange={setSearch}
          searchable
          allowDeselect={false}
          limit={50}
          disabled={!areNamesKnown} // the model at first, which comes with the names, would replace what is typed by then
        />
        {answer.error ? (
          <Alert color="red" role="alert" className="answer">
            {answer.error}
          </Alert>
        ) : (
          <Text component="div" className="answer" aria-live="polite" aria-busy={answer.isRunning} aria-label={`Answer of the ${side === "left" ? "first" : "second"} model`} role="region">
            {answer.thought && (
              <Text c="dimmed" size="sm" fs="italic">
                {answer.thought}
              </Text>
            )}
            {answer.text || (
              <Text c="dimmed" size="sm" span>
                {answer.isRunning ? "…" : "The answer appears here, token by token."}
              </Text>
            )}
          </Text>
        )}
        <Group gap={6} mih={52} align="flex-start">
          {answer.model && <Badge color="gray">{answer.model}</Badge>}
          {answer.firstToken !== null && <Badge>first token {format.duration(answer.firstToken)}</Badge>}
          {answer.seconds !== null && answer.outputTokens > 1 && (
            <Badge>{((answer.outputTokens - 1) / Math.max(0.001, answer.seconds - (answer.firstToken ?? 0))).toFixed(1)} tokens/s</Badge>
          )}
          {answer.outputTokens > 0 && (
            <Badge color="gray">
              {format.count(answer.promptTokens)} in{answer.cachedTokens > 0 && `, ${format.count(answer.cachedTokens)} cached`}
              {answer.imageTokens > 0 && `, ${format.count(answer.imageTokens)} of images`},{" "}
              {format.count(answer.outputTokens)} out
            </Badge>
          )}
        </Group>
      </Stack>
    </Card>
  );
}

interface Chunk {
  model: string;
  choices: { delta: { content?: string | null; reasoning_content?: string | null } }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens: number; image_tokens?: number } } | null;
  error?: { message: string };
}

async function stream(model: string, parameters: Parameters, signal: AbortSignal, show: (answer: Answer) => void) {
  const began = performance.now();
  const passed = () => (performance.now() - began) / 1000;
  let answer: Answer = { ...NOTHING, isRunning: true };
  show(answer);
  const change = (part: Partial<Answer>) => show((answer = { ...answer, ...part }));
  try {
    const messages = [
      ...(parameters.system.trim() ? [{ role: "system", content: parameters.system }] : []),
      { role: "user", content: await contentOf(parameters) },
    ];
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal,
      headers: { ...headersFor("POST"), "Content-Type": "application/json" },
      body: JSON.stringify({
        model,
        messages,
        temperature: parameters.temperature,
        max_tokens: parameters.maxTokens,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw refusal(await response.json().catch(() => null), response.status);
    for await (const chunk of chunksOf(response.body!)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta;
      const text = delta?.content ?? "";
      const thought = delta?.reasoning_content ?? "";
      if ((text || thought) && answer.firstToken === null) change({ firstToken: passed() });
      change({
        model: chunk.model,
        text: answer.text + text,
        thought: answer.thought + thought,
        ...(chunk.usage && {
          promptTokens: chunk.usage.prompt_tokens,
          outputTokens: chunk.usage.completion_tokens,
          cachedTokens: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
          imageTokens: chunk.usage.prompt_tokens_details?.image_tokens ?? 0,
        }),
      });
    }
    change({ seconds: passed() });
  } catch (error) {
    if (!signal.aborted) change({ error: reasonOf(error as Error, parameters.images) });
  } finally {
    change({ isRunning: false });
  }
}

/** The user's turn: the images, then the text. */
async function contentOf({ prompt, images }: Parameters) {
  if (images.length === 0) return prompt;
  const parts = await Promise.all(images.map(async (file) => ({ type: "image_url", image_url: { url: await dataUrlOf(file) } })));
  return [...parts, ...(prompt.trim() ? [{ type: "text", text: prompt }] : [])];
}

/** The server's words, after the name of the image whose part they are about. */
function reasonOf(error: Error, images: File[]): string {
  const place = error instanceof ApiError && /\.content\[(\d+)\]$/.exec(error.param ?? "")?.[1];
  const image = place ? images[Number(place)] : undefined;
  return image ? `${image.name}: ${error.message}` : error.message;
}

/** The events of a stream: `data: {...}` lines up to `data: [DONE]`. */
async function* chunksOf(body: ReadableStream<Uint8Array>): AsyncGenerator<Chunk> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6)) as Chunk;
    }
  }
}
