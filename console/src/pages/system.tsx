import { Alert, Badge, Group, Progress, SimpleGrid, Skeleton, Stack, Text } from "@mantine/core";
import { IconAlertTriangle, IconCircleCheck } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useEffect, useState } from "react";
import { api, unwrap, type ActivityObject, type EngineLoadObject, type OverviewObject } from "../api/client";
import { Next, Timeline } from "../components/activity";
import { Confirm, DataTable, Figure, Loaded, Page, report, Section, State } from "../components/ui";
import * as format from "../format";

const TimeBars = lazy(() => import("../components/chart"));
const POLL_MS = 2_000;
const KEPT = 60;
const MAP_CELLS = 400;

interface Rates {
  at: number;
  prompt: number;
  output: number;
  cached: number;
}

/** The operator's page: is all well, what do the engines do, who is served. */
export default function System() {
  const overview = useQuery({
    queryKey: ["operator", "overview"],
    queryFn: () => unwrap(api.GET("/admin/overview")),
    refetchInterval: POLL_MS,
    staleTime: 0,
  });
  const activity = useQuery({
    queryKey: ["operator", "activity"],
    queryFn: () => unwrap(api.GET("/admin/activity")),
    refetchInterval: POLL_MS,
    staleTime: 0,
  });
  const rates = useRates(overview.data);
  return (
    <Page title="System" about="This server, now. Figures are read every two seconds while the page is visible.">
      <Loaded query={overview} height={600}>
        {(found) => (
          <>
            <Health overview={found} />
            <Now overview={found} rates={rates} />
            <Section title="Tokens per second" about="over the last minutes, all engines together">
              <Suspense fallback={<Skeleton height={200} />}>
                <TimeBars
                  label="Tokens per second"
                  hourly
                  height={200}
                  points={rates.map((one) => ({ at: one.at, values: { prompt: one.prompt, output: one.output, cached: one.cached } }))}
                />
              </Suspense>
            </Section>
            {found.engines.map((engine) => (
              <Engine
                key={`${engine.engine.base_model} ${engine.engine.engine}`}
                load={engine}
                activity={activity.data?.data.find((one) => one.engine === engine.engine.engine && one.base_model === engine.engine.base_model)}
              />
            ))}
          </>
        )}
      </Loaded>
    </Page>
  );
}

/** Rates between two readings, of the last readings. */
function useRates(now: OverviewObject | undefined): Rates[] {
  const [before, setBefore] = useState<OverviewObject | undefined>();
  const [rates, setRates] = useState<Rates[]>([]);
  useEffect(() => {
    if (now === undefined || now.at === before?.at) return;
    if (before !== undefined && now.at > before.at) {
      const total = (overview: OverviewObject, pick: (load: EngineLoadObject) => number) =>
        overview.engines.reduce((sum, load) => sum + pick(load), 0);
      const rate = (pick: (load: EngineLoadObject) => number) =>
        Math.max(0, Math.round((total(now, pick) - total(before, pick)) / (now.at - before.at)));
      const one = {
        at: now.at,
        prompt: rate((load) => load.prompt_tokens),
        output: rate((load) => load.output_tokens),
        cached: rate((load) => load.cached_tokens),
      };
      setRates((kept) => [...kept, one].slice(-KEPT));
    }
    setBefore(now);
  }, [now, before]);
  return rates;
}

function Health({ overview }: { overview: OverviewObject }) {
  const problems = [
    overview.draining && "The server is draining: new requests get 503.",
    !overview.database_reachable && "The database does not answer.",
    overview.ledger_drift_tokens !== 0 &&
      `The engines counted ${format.count(overview.ledger_drift_tokens)} tokens that the ledger does not have. Run "loramux reconcile".`,
    ...overview.engines.map(
      (load) => load.engine.state === "lost" && `The engine ${load.engine.engine} of ${load.engine.base_model} is lost: ${load.engine.problem}`,
    ),
    ...overview.sinks.map((sink) => sink.outcome === "parked" && `The sink ${sink.sink} has ${sink.count} parked entries.`),
  ].filter((problem): problem is string => typeof problem === "string");
  if (problems.length === 0) {
    return (
      <Alert color="teal" icon={<IconCircleCheck />} title="All is well" role="status">
        Engines serve, the database answers, and the ledger has every token that the engines counted. Up for{" "}
        {format.duration(overview.at - overview.started_at)}.
      </Alert>
    );
  }
  return (
    <Alert color="red" icon={<IconAlertTriangle />} title="Something needs you" role="alert">
      {problems.map((problem) => (
        <Text key={problem} size="sm">
          {problem}
        </Text>
      ))}
    </Alert>
  );
}

function Now({ overview, rates }: { overview: OverviewObject; rates: Rates[] }) {
  const sum = (pick: (load: EngineLoadObject) => number) => overview.engines.reduce((total, load) => total + pick(load), 0);
  const hits = sum((load) => load.adapter_hits);
  const misses = sum((load) => load.adapter_misses);
  const last = rates.at(-1);
  return (
    <SimpleGrid cols={{ base: 2, md: 4 }}>
      <Figure label="Running" value={format.count(sum((load) => load.running))} unit="sequences" note={`${format.count(sum((load) => load.waiting))} wait`} />
      <Figure label="Output" value={last ? format.count(last.output) : "–"} unit="tokens/s" note={last ? `${format.count(last.prompt)} prompt tokens/s` : "measuring"} />
      <Figure label="Adapters in the pool" value={format.count(sum((load) => load.adapters_resident))} note={`${hits + misses > 0 ? format.share(hits / (hits + misses)) : "–"} found there`} />
      <Figure
        label="Ledger"
        value={overview.ledger_drift_tokens === 0 ? "exact" : format.count(overview.ledger_drift_tokens)}
        unit={overview.ledger_drift_tokens === 0 ? undefined : "tokens adrift"}
        color={overview.ledger_drift_tokens === 0 ? "teal" : "red"}
        note={`${format.count(overview.requests_unsettled)} requests being settled`}
      />
    </SimpleGrid>
  );
}

function Engine({ load, activity }: { load: EngineLoadObject; activity: ActivityObject | undefined }) {
  const queries = useQueryClient();
  const { engine } = load;
  async function order(what: "drain" | "restart") {
    const body = { engine: engine.engine };
    await unwrap(what === "drain" ? api.POST("/admin/engines/drain", { body }) : api.POST("/admin/engines/restart", { body }));
    await queries.invalidateQueries({ queryKey: ["operator"] });
    report(what === "drain" ? `${engine.engine} gets no more requests` : `${engine.engine} restarts`);
  }
  return (
    <Section
      title={`${engine.base_model}: ${engine.engine}`}
      about={
        <Group gap="xs" mt={4} component="span">
          <State value={engine.state} />
          <Text span size="sm">
            {format.count(load.steps)} steps · started {format.count(engine.starts)} {engine.starts === 1 ? "time" : "times"}
          </Text>
        </Group>
      }
      actions={
        <Group gap="xs">
          <Confirm label="Drain" title={`Drain ${engine.engine}?`} color="orange" act={() => order("drain")}>
            It gets no more requests, and stops once it has none.
          </Confirm>
          <Confirm label="Restart" title={`Restart ${engine.engine}?`} color="orange" act={() => order("restart")}>
            Its requests finish first, or go on at other engines.
          </Confirm>
        </Group>
      }
    >
      <Stack gap="lg">
        {activity && <Timeline steps={activity.timeline} />}
        <Pool load={load} />
        {activity && <Next evictable={activity.evictable} />}
        <SimpleGrid cols={{ base: 2, sm: 3, lg: 6 }} spacing="xs">
          <Small name="Adapters in a step" value={`${load.distinct_adapters} (most ${load.max_distinct_adapters})`} />
          <Small name="Loads" value={format.count(load.adapter_loads)} />
          <Small name="Mean load" value={load.adapter_loads > 0 ? format.duration(load.adapter_load_seconds / load.adapter_loads) : "–"} />
          <Small name="Evicted" value={format.count(load.adapter_evictions)} />
          <Small name="Preempted" value={format.count(load.preemptions)} />
          <Small name="Late or refused" value={format.count(load.missed_deadlines + load.refused_over_capacity)} />
        </SimpleGrid>
        <Fairness load={load} />
      </Stack>
    </Section>
  );
}

function Small({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <Text size="xs" c="dimmed">
        {name}
      </Text>
      <Text fw={600} className="figure">
        {value}
      </Text>
    </div>
  );
}

const KINDS = [
  { key: "kv", label: "KV of running sequences", color: "teal.7" },
  { key: "kv_cached", label: "cached prefixes", color: "teal.3" },
  { key: "adapters", label: "adapters in use", color: "indigo.6" },
  { key: "adapters_idle", label: "idle adapters", color: "indigo.3" },
  { key: "free", label: "free", color: "default-border" },
] as const;

/** The pool as a map: each cell is so many pages, in the order of their kinds. */
function Pool({ load }: { load: EngineLoadObject }) {
  const { pool } = load;
  if (pool.total === 0) return <Text size="sm">The engine has not reported yet.</Text>;
  const perCell = Math.max(1, Math.ceil(pool.total / MAP_CELLS));
  const cells = KINDS.flatMap((kind) => Array.from({ length: Math.round(pool[kind.key] / perCell) }, () => kind.color));
  const said = KINDS.map((kind) => `${kind.label}: ${format.count(pool[kind.key])}`).join(", ");
  return (
    <div>
      <Group justify="space-between" mb="xs">
        <Text fw={600} size="sm">
          Pool: {format.count(pool.total)} pages
        </Text>
        <Text size="xs" c="dimmed">
          a cell is {format.count(perCell)} {perCell === 1 ? "page" : "pages"}
        </Text>
      </Group>
      <div className="pool-map" role="img" aria-label={said}>
        {cells.map((color, place) => (
          <i key={place} style={{ background: `var(--mantine-color-${color.replace(".", "-")})` }} />
        ))}
      </div>
      <Group gap="md" mt="sm">
        {KINDS.map((kind) => (
          <Group key={kind.key} gap={6}>
            <i style={{ width: 10, height: 10, borderRadius: 3, background: `var(--mantine-color-${kind.color.replace(".", "-")})` }} />
            <Text size="xs" className="figure">
              {kind.label} {format.count(pool[kind.key])}
            </Text>
          </Group>
        ))}
      </Group>
    </div>
  );
}

function Fairness({ load }: { load: EngineLoadObject }) {
  const whole = load.tenants.reduce((sum, one) => sum + one.units, 0);
  if (whole === 0) {
    return (
      <Text size="sm" c="dimmed">
        No tenant was served since this engine's start.
      </Text>
    );
  }
  return (
    <div>
      <Group justify="space-between" mb="xs">
        <Text fw={600} size="sm">
          Service by tenant since the start
        </Text>
        <Badge color="gray">largest gap now: {format.count(Math.round(load.service_gap))} units</Badge>
      </Group>
      <DataTable
        label="Service by tenant"
        rows={load.tenants}
        keyOf={(one) => `${one.tenant} ${one.service_class}`}
        minWidth={420}
        columns={[
          { title: "Tenant", cell: (one) => one.tenant ?? "all others" },
          { title: "Class", cell: (one) => one.service_class },
          { title: "Share", width: "40%", cell: (one) => <Progress value={(100 * one.units) / whole} aria-label={`${one.tenant}: ${format.share(one.units / whole)}`} /> },
          { title: "Units", number: true, cell: (one) => format.count(Math.round(one.units)) },
        ]}
      />
    </div>
  );
}
