import { Alert, Anchor, Badge, Center, Group, SimpleGrid, Skeleton, Stack, Text, Tooltip } from "@mantine/core";
import { IconAlertTriangle, IconCircleCheck, IconServer2 } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useEffect, useState } from "react";
import { api, unwrap, type ActivityObject, type EngineLoadObject, type OverviewObject } from "../api/client";
import { Next, Timeline } from "../components/activity";
import { Confirm, DataTable, Empty, Figure, Loaded, Page, report, Section, State } from "../components/ui";
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
              {rates.length === 0 ? (
                <Center h={200}>
                  <Text size="sm" c="dimmed">
                    The first figures come with the second reading.
                  </Text>
                </Center>
              ) : (
                <Suspense fallback={<Skeleton height={200} role="img" aria-label="Loading" />}>
                  <TimeBars
                    label="Tokens per second"
                    hourly
                    height={200}
                    points={rates.map((one) => ({ at: one.at, values: { prompt: one.prompt, output: one.output, cached: one.cached } }))}
                  />
                </Suspense>
              )}
            </Section>
            {found.engines.length === 0 && (
              <Empty icon={IconServer2} title="No base model is loaded">
                Add one with "loramux base add", or in the settings file; its engines appear here.
              </Empty>
            )}
            {found.engines.length > 1 && <Fleet engines={found.engines} />}
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
      id={anchorOf(load)}
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
          {engine.linears && <Linears linears={engine.linears} />}
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

/** The format of the linears on a CPU, and how near a step is to the time that memory needs for the weights. */
function Linears({ linears }: { linears: NonNullable<EngineLoadObject["engine"]["linears"]> }) {
  const { gflops, memory_gb_per_s: memory, floor_ms: floor, reading_ms: reading } = linears;
  return (
    <>
      <Small name="Linears" value={gflops == null ? linears.format : `${linears.format}, ${format.count(Math.round(gflops))} GFLOP/s`} />
      {memory != null && <Small name="Memory reads" value={`${memory.toFixed(1)} GB/s`} />}
      {floor != null && <Small name="Floor of a step" value={`${floor.toFixed(1)} ms, ${format.count(Math.round(1000 / floor))} steps/s`} />}
      {floor != null && reading != null && <Small name="Floor reached" value={`${format.share(floor / reading)} (${reading.toFixed(1)} ms)`} />}
    </>
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

type Service = EngineLoadObject["tenants"][number];

/** What a tenant had of its class, beside what its weight gives it where all of them wait. */
function Fairness({ load }: { load: EngineLoadObject }) {
  const sums = new Map<string, { units: number; weight: number }>();
  for (const one of load.tenants) {
    const sum = sums.get(one.service_class) ?? { units: 0, weight: 0 };
    sums.set(one.service_class, { units: sum.units + one.units, weight: sum.weight + (one.weight ?? 0) });
  }
  const served = load.tenants.filter((one) => one.units > 0);
  if (served.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        No tenant was served since this engine's start.
      </Text>
    );
  }
  const part = (one: Service) => one.units / sums.get(one.service_class)!.units;
  const share = (one: Service) => (one.weight == null ? null : one.weight / sums.get(one.service_class)!.weight);
  return (
    <div>
      <Group justify="space-between" mb="xs">
        <Text fw={600} size="sm">
          Service by tenant since the start
        </Text>
        <Tooltip label="Between two tenants of a class that wait now; the scheduler keeps it bounded" multiline w={240}>
          <Badge color="gray">largest gap now: {format.count(Math.round(load.service_gap))} units</Badge>
        </Tooltip>
      </Group>
      <Text size="sm" c="dimmed" mb="xs">
        The mark is a tenant's share by its weight, among those of its class that were served. It gets at least that while it waits; less than it means that it asked for less.
      </Text>
      <DataTable
        label="Service by tenant"
        rows={served}
        keyOf={(one) => `${one.tenant} ${one.service_class}`}
        columns={[
          { title: "Tenant", cell: (one) => one.tenant ?? "all others" },
          { title: "Class", width: 100, cell: (one) => one.service_class },
          { title: "Weight", width: 70, number: true, cell: (one) => (one.weight == null ? "–" : format.count(one.weight)) },
          { title: "Of its class", width: "34%", cell: (one) => <Part part={part(one)} share={share(one)} name={one.tenant ?? "all others"} /> },
          { title: "Served", width: 80, number: true, cell: (one) => format.share(part(one)) },
          { title: "Share", width: 80, number: true, cell: (one) => (share(one) === null ? "–" : format.share(share(one)!)) },
          { title: "Units", width: 110, number: true, cell: (one) => format.count(Math.round(one.units)) },
        ]}
      />
    </div>
  );
}

function Part({ part, share, name }: { part: number; share: number | null; name: string }) {
  const said = `${name}: served ${format.share(part)}${share === null ? "" : `, share ${format.share(share)}`}`;
  return (
    <div className="part" role="img" aria-label={said}>
      <i style={{ width: `${100 * part}%` }} />
      {share !== null && <b style={{ left: `${100 * share}%` }} />}
    </div>
  );
}

/** The engines beside each other, where there is more than one. */
function Fleet({ engines }: { engines: EngineLoadObject[] }) {
  const used = ({ pool }: EngineLoadObject) => (pool.total > 0 ? 1 - pool.free / pool.total : null);
  return (
    <Section title="Fleet" about={`${format.count(engines.length)} engines; requests go where their adapter and their prefix are, and where there is room.`}>
      <DataTable
        label="Engines"
        rows={engines}
        keyOf={(one) => `${one.engine.base_model} ${one.engine.engine}`}
        columns={[
          { title: "Engine", cell: (one) => <Anchor href={`#${anchorOf(one)}`} size="sm">{one.engine.engine}</Anchor> },
          { title: "Base", cell: (one) => one.engine.base_model },
          { title: "State", width: 110, cell: (one) => <State value={one.engine.state} /> },
          { title: "Running", width: 90, number: true, cell: (one) => format.count(one.running) },
          { title: "Waiting", width: 90, number: true, cell: (one) => format.count(one.waiting) },
          { title: "Adapters", width: 90, number: true, cell: (one) => format.count(one.adapters_resident) },
          { title: "Pool in use", width: 110, number: true, cell: (one) => (used(one) === null ? "–" : format.share(used(one)!)) },
          { title: "Starts", width: 80, number: true, cell: (one) => format.count(one.engine.starts) },
          { title: "Last end", cell: (one) => one.engine.problem ?? "–" },
        ]}
      />
    </Section>
  );
}

const anchorOf = (one: EngineLoadObject) => `engine-${one.engine.base_model}-${one.engine.engine}`;
