import { Alert, Button, Code, Group, List, MultiSelect, Select, SimpleGrid, Slider, Stack, Switch, Text } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";
import { api, unwrap, type BasePlanObject, type PlanBody, type PlanChoices, type PlanObject, type TrialObject } from "../api/client";
import { complain, Copy, DataTable, Figure, Loaded, Page, report, Section } from "../components/ui";
import * as format from "../format";

/** Sliders: steps grow with the value. */
const KNOBS = [
  { key: "rate", label: "Requests per second", values: [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], start: 4 },
  { key: "prompt_tokens", label: "Prompt tokens, mean", values: [50, 100, 200, 500, 1000, 2000, 4000], start: 3 },
  { key: "output_tokens", label: "Answer tokens, mean", values: [10, 20, 50, 100, 200, 500, 1000], start: 3 },
  { key: "adapters", label: "Adapters", values: [0, 1, 10, 50, 100, 500, 1000, 2000], start: 3 },
  { key: "tenants", label: "Tenants", values: [1, 5, 20, 100, 500], start: 1 },
  { key: "ttft_ms", unit: "ms", label: "Goal: first token, P99", values: [100, 250, 500, 1000, 2000, 5000], start: 3 },
  { key: "itl_ms", unit: "ms", label: "Goal: between two tokens, P99", values: [10, 20, 50, 100, 200], start: 3 },
] as const;
type Knob = (typeof KNOBS)[number]["key"];

const RANKS = [8, 16, 32, 64, 128, 256].map(String);
const SIZES = [1, 2, 4, 8].map(String);
const MEASURED = "measured:";

/** What-if: how many GPUs a workload needs, by simulating the server's own scheduler. */
export default function Plan() {
  const queries = useQueryClient();
  const queryKey = ["operator", "plan"];
  const choices = useQuery({ queryKey, queryFn: () => unwrap(api.GET("/admin/plan")), refetchInterval: 5_000 });
  const [places, setPlaces] = useState(Object.fromEntries(KNOBS.map((knob) => [knob.key, knob.start])) as Record<Knob, number>);
  const [gpu, setGpu] = useState<string | null>(null);
  const [models, setModels] = useState<string[]>([]);
  const [ranks, setRanks] = useState(["16"]);
  const [size, setSize] = useState("1");
  const [quantization, setQuantization] = useState<Quantization | null>(null);
  const [kvType, setKvType] = useState<"auto" | "fp8" | null>(null);
  const [withStatic, setWithStatic] = useState(false);
  const asking = useRef<AbortController | null>(null);
  const plan = useMutation({
    mutationFn: () => {
      asking.current = new AbortController();
      const values = Object.fromEntries(KNOBS.map((knob) => [knob.key, knob.values[places[knob.key]]])) as Record<Knob, number>;
      const device = gpu ?? choices.data!.gpus[0]!;
      const bases = models.length > 0 ? models : [choices.data!.models[0]!];
      const body = {
        ...values,
        ...(device.startsWith(MEASURED) ? { profile: device.slice(MEASURED.length) } : { gpu: device }),
        bases: bases.map((model) => ({ name: model, model })),
        ranks: ranks.map(Number),
        tensor_parallel_size: Number(size),
        quantization,
        kv_cache_dtype: kvType,
        compare_static: withStatic,
      };
      return unwrap(api.POST("/admin/plan", { body, signal: asking.current.signal }));
    },
    onSettled: () => queries.invalidateQueries({ queryKey }),
  });
  // The server ends a search whose page is left: nothing blocks the next one.
  useEffect(() => () => asking.current?.abort(), []);
  async function cancel() {
    const { cancelled } = await unwrap(api.DELETE("/admin/plan"));
    report(cancelled ? "The search is cancelled" : "No search was running");
    await queries.invalidateQueries({ queryKey });
  }
  return (
    <Page title="Planner" about="How many GPUs a workload needs, and with which settings: the server's own scheduler, simulated. A question takes up to 90 seconds.">
      <Loaded query={choices}>
        {(found) => (
          <>
            {found.running_since !== null && !plan.isPending && (
              <Alert color="yellow" title="A search is running" role="status">
                <Group justify="space-between">
                  <Text size="sm">It began {format.ago(found.running_since)}, in another window or by another operator. The next one waits for its end.</Text>
                  <Button size="xs" variant="default" onClick={() => void cancel().catch(complain)}>
                    Cancel that search
                  </Button>
                </Group>
              </Alert>
            )}
            <Section title="Workload">
              <SimpleGrid cols={{ base: 1, sm: 2 }} spacing="xl" verticalSpacing="lg">
                <Select label="GPU" data={devicesOf(found)} value={gpu ?? found.gpus[0]!} onChange={setGpu} allowDeselect={false} />
                <MultiSelect
                  label="Base models"
                  description="Several bases share the requests equally, each on GPUs of its own."
                  data={found.models}
                  value={models.length > 0 ? models : [found.models[0]!]}
                  onChange={setModels}
                  maxValues={8}
                />
                <Select
                  label="Weights"
                  placeholder="As saved, or as measured"
                  data={found.quantizations}
                  value={quantization}
                  onChange={(value) => setQuantization(value as Quantization | null)}
                  clearable
                />
                <Select
                  label="Keys and values"
                  placeholder="As the weights, or as measured"
                  data={["auto", "fp8"]}
                  value={kvType}
                  onChange={(value) => setKvType(value as "auto" | "fp8" | null)}
                  clearable
                />
                <MultiSelect label="Ranks of the adapters" description="In turn." data={RANKS} value={ranks} onChange={(value) => value.length > 0 && setRanks(value)} />
                <Select label="Tensor parallel ranks of an engine" data={SIZES} value={size} onChange={(value) => setSize(value ?? "1")} allowDeselect={false} />
                <Switch label="Compare with static batching" checked={withStatic} onChange={(event) => setWithStatic(event.currentTarget.checked)} />
                <div />
                {KNOBS.map((knob) => (
                  <div key={knob.key}>
                    <Text size="sm" mb={4}>
                      {knob.label}: <b className="figure">{format.count(knob.values[places[knob.key]]!)}</b>
                      {"unit" in knob && ` ${knob.unit}`}
                    </Text>
                    <Slider
                      min={0}
                      max={knob.values.length - 1}
                      step={1}
                      label={(place) => format.count(knob.values[place]!)}
                      value={places[knob.key]}
                      onChange={(place) => setPlaces((before) => ({ ...before, [knob.key]: place }))}
                      thumbLabel={knob.label}
                    />
                  </div>
                ))}
              </SimpleGrid>
              <Group justify="flex-end" mt="xl">
                {plan.isPending && (
                  <Button variant="default" onClick={() => void cancel().catch(complain)}>
                    Cancel
                  </Button>
                )}
                <Button loading={plan.isPending} onClick={() => plan.mutate()}>
                  Make a plan
                </Button>
              </Group>
            </Section>
          </>
        )}
      </Loaded>
      {plan.error && (
        <Alert color="red" role="alert" title="There is no plan">
          {plan.error.message}
        </Alert>
      )}
      {plan.data && <Found plan={plan.data} />}
    </Page>
  );
}

const BOUND = { first_token: "the first token", inter_token: "the time between two tokens" };

type Quantization = NonNullable<PlanBody["quantization"]>;

/** Devices in two groups: the figures of one are estimates. */
const devicesOf = (found: PlanChoices) => [
  { group: "Estimated from a data sheet", items: found.gpus },
  { group: "Measured", items: found.profiles.map((name) => ({ value: MEASURED + name, label: name })) },
];

function Found({ plan }: { plan: PlanObject }) {
  return (
    <Stack gap="lg">
      {plan.bases.length > 1 && (
        <SimpleGrid cols={{ base: 2, md: 4 }}>
          <Figure label="All bases" value={format.money(plan.dollars_per_hour, "USD")} note="per hour" color={plan.goals_met ? "teal" : "red"} />
        </SimpleGrid>
      )}
      {plan.bases.map((base) => (
        <FoundBase key={base.base} base={base} goals={plan.goals} isOnly={plan.bases.length === 1} />
      ))}
    </Stack>
  );
}

type Goals = PlanObject["goals"];

function FoundBase({ base, goals, isOnly }: { base: BasePlanObject; goals: Goals; isOnly: boolean }) {
  const best = base.recommended;
  const of = isOnly ? "" : ` of ${base.base}`;
  return (
    <Stack gap="lg">
      {!isOnly && <Text fw={600}>{base.base}</Text>}
      <Text size="sm" c="dimmed">
        Times: {base.times}.
      </Text>
      <SimpleGrid cols={{ base: 2, md: 4 }}>
        <Figure label="GPUs" value={format.count(best.gpus)} note={base.goals_met ? "the goals are kept" : "no candidate keeps the goals: this one is closest"} color={base.goals_met ? "teal" : "red"} />
        <Figure label="First token, P99" value={format.duration(best.ttft_ms_p99 / 1000)} note={`goal ${format.duration(goals.ttft_ms / 1000)}`} />
        <Figure label="Between tokens, P99" value={format.duration(best.itl_ms_p99 / 1000)} note={`goal ${format.duration(goals.itl_ms / 1000)}`} />
        <Figure label="Cost" value={format.money(best.dollars_per_million_tokens, "USD")} note={`per million tokens; ${format.money(base.dollars_per_hour, "USD")} per hour`} />
      </SimpleGrid>
      <Section title={`Why ${format.count(best.gpus)} ${best.gpus === 1 ? "GPU" : "GPUs"}`} about={`Bound by ${BOUND[base.reason.bound_by]}.`}>
        <Text size="sm">{base.reason.text}</Text>
        <GoalsFigure base={base} goals={goals} />
      </Section>
      {base.alternatives.length > 0 && (
        <Section title="Cheaper" about="What costs less, and what it does to the goals.">
          <List size="sm">
            {base.alternatives.map((one) => (
              <List.Item key={one.text}>{one.text}</List.Item>
            ))}
          </List>
        </Section>
      )}
      {base.static.length > 0 && (
        <Section title="Static batching" about="Requests wait until all of a batch have ended: with as many GPUs, and with the fewest that keep the goals.">
          <Batching base={base} goals={goals} label={`Batching${of}`} />
        </Section>
      )}
      <Section title="Settings" about="For the settings file of each server." actions={<Copy value={base.settings} label={`Copy the settings${of}`} />}>
        <Code block className="whole" tabIndex={0} aria-label={isOnly ? "Settings of the plan" : `Settings of the plan for ${base.base}`}>
          {base.settings}
        </Code>
      </Section>
      <Section title="Simulated" about="Each line is one simulation, and what it changes of the chosen settings. Settings that change no figure share a line.">
        <Trials base={base} label={`Simulations${of}`} />
      </Section>
    </Stack>
  );
}

function Batching({ base, goals, label }: { base: BasePlanObject; goals: Goals; label: string }) {
  const price = base.dollars_per_hour / base.recommended.gpus;
  const rows = [base.recommended, ...base.static].map((trial, place) => ({ ...trial, place }));
  return (
    <DataTable
      label={label}
      rows={rows}
      keyOf={(row) => `${row.place}`}
      columns={[
        { title: "Batching", width: 110, cell: (row) => (row.place === 0 ? "continuous" : "static") },
        { title: "GPUs", width: 70, number: true, cell: (row) => format.count(row.gpus) },
        { title: "First token, P99", width: 110, number: true, cell: (row) => format.duration(row.ttft_ms_p99 / 1000) },
        { title: "Between, P99", width: 110, number: true, cell: (row) => format.duration(row.itl_ms_p99 / 1000) },
        { title: "Tokens / s", width: 100, number: true, cell: (row) => format.count(Math.round(row.tokens_per_s)) },
        { title: "$ / hour", width: 100, number: true, cell: (row) => (price * row.gpus).toFixed(2) },
        { title: "$ / million", width: 100, number: true, cell: (row) => row.dollars_per_million_tokens.toFixed(3) },
        { title: "Goals", width: 90, cell: (row) => (row.ttft_ms_p99 <= goals.ttft_ms && row.itl_ms_p99 <= goals.itl_ms ? "kept" : "missed") },
      ]}
    />
  );
}

/** How much of its goal each latency takes, by the number of GPUs: the closest candidate of each. */
function GoalsFigure({ base, goals }: { base: BasePlanObject; goals: Goals }) {
  const parts = (trial: TrialObject) => ({ first: trial.ttft_ms_p99 / goals.ttft_ms, between: trial.itl_ms_p99 / goals.itl_ms });
  const excess = (trial: TrialObject) => Math.max(parts(trial).first, parts(trial).between);
  const best = new Map<number, TrialObject>();
  for (const trial of base.tried) {
    const known = best.get(trial.gpus);
    // all engines behind the router tell more than one engine with its part of the traffic
    if (!known || trial.simulated > known.simulated || (trial.simulated === known.simulated && excess(trial) < excess(known))) best.set(trial.gpus, trial);
  }
  best.set(base.recommended.gpus, base.recommended);
  const shown = [...best.values()].sort((a, b) => a.gpus - b.gpus);
  return (
    <figure className="goals" aria-label="Goals by number of GPUs">
      {shown.map((trial) => (
        <div key={trial.gpus} className={trial.gpus === base.recommended.gpus ? "chosen" : undefined}>
          <Text size="sm" fw={600} className="figure">
            {format.count(trial.gpus)} {trial.gpus === 1 ? "GPU" : "GPUs"}
            {trial.gpus === base.recommended.gpus && " (chosen)"}
          </Text>
          <Stack gap={6} flex={1}>
            <OfGoal name="First token" part={parts(trial).first} />
            <OfGoal name="Between tokens" part={parts(trial).between} />
          </Stack>
        </div>
      ))}
      <Text size="xs" c="dimmed" component="figcaption">
        P99 as a part of its goal; the mark is the goal. A bar ends at twice the goal.
      </Text>
    </figure>
  );
}

function OfGoal({ name, part }: { name: string; part: number }) {
  const color = part > 1 ? "red" : "teal";
  return (
    <div className="of-goal">
      <Text size="xs">{name}</Text>
      <div className="part" role="img" aria-label={`${name}: ${format.share(part)} of the goal`}>
        <i style={{ width: `${Math.min(100, 50 * part)}%`, background: `var(--mantine-color-${color}-6)` }} />
        <b style={{ left: "50%" }} />
      </div>
      <Text size="xs" className="figure" ta="right">
        {format.share(part)}
      </Text>
    </div>
  );
}

/** The settings that a simulation tries, with their names for readers. */
const SETTINGS = [
  { key: "max_num_batched_tokens", label: "tokens of a step" },
  { key: "max_num_seqs", label: "sequences" },
  { key: "block_size", label: "tokens of a page" },
] as const;

const settingsOf = (trial: TrialObject) => [
  ...SETTINGS.map(({ key, label }) => ({ label, value: format.count(trial[key]) })),
  { label: "class shares", value: trial.class_shares.join(" : ") },
];

function Trials({ base, label }: { base: BasePlanObject; label: string }) {
  const best = base.recommended;
  const isChosen = (trial: TrialObject) => JSON.stringify(trial) === JSON.stringify(best);
  const chosen = settingsOf(best);
  const change = (trial: TrialObject) => {
    const others = settingsOf(trial).filter((one, place) => one.value !== chosen[place]!.value);
    return others.length > 0 ? others.map((one) => `${one.label} ${one.value}`).join(", ") : trial.simulated > 1 ? "all GPUs behind the router" : "nothing else";
  };
  // Settings that change nothing that is shown are one line.
  const figures = (trial: TrialObject) => [trial.gpus, trial.ttft_ms_p99, trial.itl_ms_p99, trial.pool_use, trial.preemption_rate].join(" ");
  const lines = new Map<string, TrialObject[]>();
  for (const trial of base.tried) {
    const key = isChosen(trial) ? "chosen" : figures(trial);
    lines.set(key, [...(lines.get(key) ?? []), trial]);
  }
  const rows = [...lines.entries()]
    .map(([key, trials]) => ({ ...trials[0]!, key, trials }))
    .sort((a, b) => Number(b.key === "chosen") - Number(a.key === "chosen") || a.gpus - b.gpus);
  return (
    <DataTable
      label={label}
      rows={rows}
      keyOf={(row) => row.key}
      columns={[
        { title: "GPUs", width: 70, number: true, cell: (row) => format.count(row.gpus) },
        { title: "With", width: 190, cell: (row) => (row.key === "chosen" ? <b>the chosen one</b> : row.trials.map(change).join("; or ")) },
        { title: "First token, P99", width: 110, number: true, cell: (row) => format.duration(row.ttft_ms_p99 / 1000) },
        { title: "Between, P99", width: 110, number: true, cell: (row) => format.duration(row.itl_ms_p99 / 1000) },
        { title: "Pool in use", width: 100, number: true, cell: (row) => format.share(row.pool_use) },
        { title: "Preempted", width: 100, number: true, cell: (row) => format.share(row.preemption_rate) },
        { title: "Bound by", width: 100, cell: (row) => row.bound_by },
        { title: "$ / million", width: 100, number: true, cell: (row) => row.dollars_per_million_tokens.toFixed(3) },
      ]}
    />
  );
}
