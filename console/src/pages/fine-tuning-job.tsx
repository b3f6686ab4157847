import { Alert, Anchor, Button, Code, Group, Select, SimpleGrid, Skeleton, Text } from "@mantine/core";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useMemo, useState } from "react";
import { Link } from "wouter";
import { api, unwrap, type FineTuningCheckpointObject, type FineTuningEventObject, type FineTuningJobObject } from "../api/client";
import type { Curve } from "../components/curves";
import { complain, Confirm, DataTable, Figure, Loaded, Page, report, Section, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const Curves = lazy(() => import("../components/curves"));
const PAGE = 100;
/** A job logs the figures of a thousand steps at most, and a few messages for each checkpoint. */
const MOST_PAGES = 20;
const SHOWN = 50;
const ENDED = ["succeeded", "failed", "cancelled"];
const PAUSABLE = ["validating_files", "queued", "running"];

interface Sample {
  prompt: string;
  expected: string;
  answer: string;
}

/** One job: how its loss falls, what it answered before and after, what it has made. */
export default function FineTuningJob({ id }: { id: string }) {
  const path = { job_id: id };
  const job = useQuery({
    queryKey: ["fine-tuning", id],
    queryFn: () => unwrap(api.GET("/v1/fine_tuning/jobs/{job_id}", { params: { path } })),
    refetchInterval: (query) => (ENDED.includes(query.state.data?.status ?? "") ? false : 2_000),
  });
  const status = job.data?.status ?? "";
  const every = ENDED.includes(status) ? false : 5_000;
  const events = useQuery({ queryKey: ["fine-tuning", id, "events", ENDED.includes(status)], queryFn: () => allEvents(id), refetchInterval: every });
  const checkpoints = useQuery({
    queryKey: ["fine-tuning", id, "checkpoints", status],
    queryFn: () => unwrap(api.GET("/v1/fine_tuning/jobs/{job_id}/checkpoints", { params: { path, query: { limit: PAGE } } })),
  });
  return (
    <Page
      title="Fine-tuning job"
      about={
        <Group gap={4} component="span">
          <Anchor component={Link} href="/fine-tuning" size="sm">
            Fine-tuning
          </Anchor>
          <Text span c="dimmed" size="sm">
            / job
          </Text>
          <Code className="long">{id}</Code>
        </Group>
      }
      actions={job.data && <Orders job={job.data} />}
    >
      <Loaded query={job} height={104}>
        {(found) => (
          <>
            {found.error && (
              <Alert color="red" title="The job failed">
                {found.error.message}
              </Alert>
            )}
            <Facts job={found} events={events.data ?? []} />
          </>
        )}
      </Loaded>
      <Loaded query={events}>
        {(log) => (
          <>
            <Losses log={log} />
            <Samples log={log} />
          </>
        )}
      </Loaded>
      <Loaded query={checkpoints} height={80}>
        {(found) => <Checkpoints rows={found.data as FineTuningCheckpointObject[]} />}
      </Loaded>
      <Loaded query={events}>{(log) => <Log log={log} />}</Loaded>
    </Page>
  );
}

function Orders({ job }: { job: FineTuningJobObject }) {
  const { can } = useSession();
  const queries = useQueryClient();
  if (!can("adapters") || ENDED.includes(job.status)) return null;
  const params = { path: { job_id: job.id } };
  const done = async (message: string) => {
    await queries.invalidateQueries({ queryKey: ["fine-tuning"] });
    report(message);
  };
  const pause = async () => {
    await unwrap(api.POST("/v1/fine_tuning/jobs/{job_id}/pause", { params }));
    await done("The job stops at its next step");
  };
  const resume = async () => {
    await unwrap(api.POST("/v1/fine_tuning/jobs/{job_id}/resume", { params }));
    await done("The job goes on");
  };
  return (
    <>
      {PAUSABLE.includes(job.status) && (
        <Button variant="default" onClick={() => void pause().catch(complain)}>
          Pause
        </Button>
      )}
      {job.status === "paused" && (
        <Button variant="default" onClick={() => void resume().catch(complain)}>
          Resume
        </Button>
      )}
      <Confirm
        label="Cancel it"
        size="sm"
        title="Cancel the job?"
        act={async () => {
          await unwrap(api.POST("/v1/fine_tuning/jobs/{job_id}/cancel", { params }));
          await done("The job ends");
        }}
      >
        Its last checkpoint becomes a revision, and the tokens up to it are billed.
      </Confirm>
    </>
  );
}

function Facts({ job, events }: { job: FineTuningJobObject; events: FineTuningEventObject[] }) {
  const latest = events.find((event) => event.data.trained_tokens !== undefined)?.data ?? {};
  const tokens = job.trained_tokens ?? (latest.trained_tokens as number | undefined);
  const { n_epochs, batch_size, learning_rate_multiplier } = job.hyperparameters;
  const left = job.estimated_finish == null ? null : Math.max(0, job.estimated_finish - Date.now() / 1000);
  const progress = latest.step === undefined ? undefined : `step ${format.count(latest.step as number)} of ${format.count(latest.total_steps as number)}`;
  const note = left === null ? progress : `${progress}, about ${format.duration(left)} left`;
  return (
    <SimpleGrid cols={{ base: 2, md: 4 }}>
      <Figure label="State" value={<Text span fz={20} fw={650}>{job.status}</Text>} color={job.status === "succeeded" ? "teal" : undefined} note={ENDED.includes(job.status) ? undefined : note} />
      <Figure label="Trained tokens" value={tokens == null ? "–" : format.count(tokens)} note={job.trained_tokens == null ? "not billed yet" : "billed, unless the job failed"} />
      <Figure label="Epochs" value={n_epochs} note={batch_size === "auto" ? "chosen after the files are read" : `batches of ${batch_size}, learning rate times ${learning_rate_multiplier}`} />
      <Figure label="Rank" value={job.lora?.r ?? "–"} note={job.lora === null ? `that of ${job.model}` : `on ${job.model}`} />
    </SimpleGrid>
  );
}

function Losses({ log }: { log: FineTuningEventObject[] }) {
  const curves = useMemo(() => curvesOf(log), [log]);
  return (
    <Section title="Loss" about="Of the training examples at each step, and of the validation file after each epoch.">
      {curves.length === 0 ? (
        <Text size="sm" c="dimmed">
          No step has ended yet.
        </Text>
      ) : (
        <Suspense fallback={<Skeleton height={260} role="img" aria-label="Loading" />}>
          <Curves label="Loss by step" curves={curves} />
        </Suspense>
      )}
    </Section>
  );
}

/** The losses by step. A job that went on from a checkpoint has logged some steps twice: the later figures count. */
function curvesOf(log: FineTuningEventObject[]): Curve[] {
  const found = [
    { name: "Training", key: "train_loss" },
    { name: "Validation", key: "valid_loss" },
  ].map(({ name, key }) => {
    const steps = new Map<number, number>();
    for (const { data } of log) {
      const step = data.step as number;
      if (typeof data[key] === "number" && !steps.has(step)) steps.set(step, data[key]);
    }
    return { name, points: [...steps].map(([x, y]) => ({ x, y })).sort((a, b) => a.x - b.x) };
  });
  return found.filter((curve) => curve.points.length > 0);
}

function Samples({ log }: { log: FineTuningEventObject[] }) {
  const steps = useMemo(() => samplesOf(log), [log]);
  const [chosen, setChosen] = useState<string | null>(null);
  const later = [...steps.keys()].filter((step) => step > 0);
  const shown = chosen === null ? later.at(-1) : Number(chosen);
  const before = steps.get(0) ?? [];
  const after = shown === undefined ? undefined : steps.get(shown);
  if (before.length === 0 && after === undefined) return null;
  const rows = (after ?? before).map((sample, place) => ({ ...sample, key: `${place}`, before: before[place]?.answer ?? "", after: after?.[place]?.answer }));
  return (
    <Section
      title="Answers before and after"
      about="To the first prompts of the validation file, at temperature 0."
      actions={
        later.length > 1 && (
          <Select
            aria-label="Checkpoint"
            size="xs"
            w={140}
            allowDeselect={false}
            data={later.map((step) => ({ value: `${step}`, label: `Step ${step}` }))}
            value={`${shown}`}
            onChange={setChosen}
          />
        )
      }
    >
      <DataTable
        label="Answers"
        rows={rows}
        keyOf={(row) => row.key}
        columns={[
          { title: "Prompt", cell: (row) => <Said>{row.prompt}</Said> },
          { title: "Before", cell: (row) => <Said>{row.before}</Said> },
          { title: shown === undefined ? "After" : `After step ${shown}`, cell: (row) => <Said>{row.after ?? ""}</Said> },
          { title: "Expected", cell: (row) => <Said>{row.expected}</Said> },
        ]}
      />
    </Section>
  );
}

function Said({ children }: { children: string }) {
  return (
    <Text size="sm" style={{ whiteSpace: "pre-wrap" }} lineClamp={8}>
      {children}
    </Text>
  );
}

/** The samples by step, in the order of the steps. */
function samplesOf(log: FineTuningEventObject[]): Map<number, Sample[]> {
  const found = new Map<number, Sample[]>();
  for (const { data } of [...log].reverse()) {
    if (Array.isArray(data.samples)) found.set(data.step as number, data.samples as Sample[]);
  }
  return new Map([...found].sort(([a], [b]) => a - b));
}

function Checkpoints({ rows }: { rows: FineTuningCheckpointObject[] }) {
  if (rows.length === 0) return null;
  return (
    <Section title="Revisions" about="What the job has made: its last checkpoint, and those of earlier epochs.">
      <DataTable
        label="Revisions"
        rows={rows}
        keyOf={(one) => one.id}
        columns={[
          {
            title: "Revision",
            cell: (one) => (
              <Link href={`/adapters/${format.localName(one.fine_tuned_model_checkpoint).split("@")[0]}`} className="row-link">
                {one.fine_tuned_model_checkpoint}
              </Link>
            ),
          },
          { title: "Step", width: 90, number: true, cell: (one) => format.count(one.step_number) },
          { title: "Training loss", width: 130, number: true, cell: (one) => loss(one.metrics.train_loss) },
          { title: "Validation loss", width: 130, number: true, cell: (one) => loss(one.metrics.valid_loss) },
        ]}
      />
    </Section>
  );
}

const loss = (value: number | undefined) => (value === undefined ? "" : format.significant(value));

function Log({ log }: { log: FineTuningEventObject[] }) {
  const rows = log.filter((event) => event.type === "message").slice(0, SHOWN);
  return (
    <Section title="Events" about="The newest first, without the figures of the steps.">
      <DataTable
        label="Events"
        rows={rows}
        keyOf={(event) => event.id}
        columns={[
          { title: "Event", cell: (event) => <Text size="sm" c={event.level === "error" ? "red" : undefined}>{event.message}</Text> },
          { title: "When", width: 130, number: true, cell: (event) => <When at={event.created_at} /> },
        ]}
      />
    </Section>
  );
}

/** The job's whole log, newest first. */
async function allEvents(id: string): Promise<FineTuningEventObject[]> {
  const found: FineTuningEventObject[] = [];
  let after: string | undefined;
  for (let page = 0; page < MOST_PAGES; page++) {
    const params = { path: { job_id: id }, query: { limit: PAGE, after } };
    const { data, has_more } = await unwrap(api.GET("/v1/fine_tuning/jobs/{job_id}/events", { params }));
    found.push(...(data as FineTuningEventObject[]));
    after = found.at(-1)?.id;
    if (!has_more) break;
  }
  return found;
}
