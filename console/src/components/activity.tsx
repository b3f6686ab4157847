// An engine as it runs: its steps by model and class, what leaves its pool next.
import { Badge, Group, SegmentedControl, Skeleton, Text } from "@mantine/core";
import { lazy, Suspense, useState } from "react";
import type { ActivityObject, StepObject } from "../api/client";
import * as format from "../format";
import { DataTable } from "./ui";

const TimeBars = lazy(() => import("./chart"));
const KINDS = [
  { value: "model", label: "Model" },
  { value: "class", label: "Class" },
  { value: "phase", label: "Phase" },
  { value: "rate", label: "Tokens/s" },
];

/** Rows of one step a second, divided as the reader chooses. */
export function Timeline({ steps }: { steps: StepObject[] }) {
  const [kind, setKind] = useState("model");
  if (steps.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        No step has run since this engine's start.
      </Text>
    );
  }
  const points = kind === "rate" ? rates(steps) : steps.map((step) => ({ at: step.at, values: rowsBy(step, kind) }));
  return (
    <div>
      <Group justify="space-between" mb="xs">
        <Text fw={600} size="sm">
          {kind === "rate" ? "Tokens per second" : "Rows of a step, one step a second"}
        </Text>
        <SegmentedControl size="xs" data={KINDS} value={kind} onChange={setKind} aria-label="Divide the steps by" />
      </Group>
      <Suspense fallback={<Skeleton height={180} role="img" aria-label="Loading" />}>
        <TimeBars label="Timeline of steps" hourly height={180} points={points} />
      </Suspense>
    </div>
  );
}

function rowsBy(step: StepObject, kind: string): Record<string, number> {
  const found: Record<string, number> = {};
  const add = (name: string, rows: number) => (found[name] = (found[name] ?? 0) + rows);
  for (const row of step.rows) {
    if (kind === "phase") {
      add("prefill", row.prefill);
      add("decode", row.decode);
    } else {
      add(kind === "class" ? row.service_class : row.model, row.prefill + row.decode);
    }
  }
  return found;
}

function rates(steps: StepObject[]) {
  return steps.slice(1).map((step, place) => {
    const before = steps[place]!;
    const seconds = Math.max(step.at - before.at, 0.001);
    const rate = (now: number, then: number) => Math.max(0, Math.round((now - then) / seconds));
    return { at: step.at, values: { prompt: rate(step.prompt_tokens, before.prompt_tokens), output: rate(step.output_tokens, before.output_tokens) } };
  });
}

function Held({ kind, model }: { kind: string; model: string }) {
  return (
    <Group gap="xs">
      <Badge color={kind === "adapter" ? "indigo" : "teal"} miw="max-content">
        {kind === "adapter" ? "adapter" : "cached prefix"}
      </Badge>
      <span className="long">{model}</span>
    </Group>
  );
}

/** What goes when pages are needed, in order, and why. */
export function Next({ evictable }: { evictable: ActivityObject["evictable"] }) {
  return (
    <div>
      <Text fw={600} size="sm">
        What leaves the pool next
      </Text>
      <Text size="xs" c="dimmed" mb="xs">
        Only when pages are needed: the lowest value of a page goes first, which is recent uses × cost of a miss. A use counts half after
        five minutes.
      </Text>
      {evictable.length === 0 ? (
        <Text size="sm" c="dimmed">
          Nothing: no page holds an idle adapter or a cached prefix.
        </Text>
      ) : (
        <DataTable
          label="What leaves the pool next"
          rows={evictable.map((one, place) => ({ ...one, place }))}
          keyOf={(one) => `${one.place}`}
          columns={[
            { title: "", width: 40, number: true, cell: (one) => one.place + 1 },
            { title: "What", width: 260, cell: (one) => <Held kind={one.kind} model={one.model} /> },
            { title: "Tenant", cell: (one) => one.tenant ?? "–" },
            { title: "Pages", width: 80, number: true, cell: (one) => format.count(one.pages) },
            { title: "Recent uses", width: 110, number: true, cell: (one) => one.recent_uses.toFixed(2) },
            { title: "Value of a page", width: 130, number: true, cell: (one) => format.significant(one.value) },
            { title: "Why not yet", width: 130, cell: (one) => (one.is_wanted ? "a request waits for it" : "room is left") },
          ]}
        />
      )}
    </div>
  );
}
