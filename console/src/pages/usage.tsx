import { Group, SegmentedControl, SimpleGrid, Skeleton, Text } from "@mantine/core";
import { IconChartBar } from "@tabler/icons-react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { lazy, Suspense, useState } from "react";
import { allKeys, api, unwrap, type UsageResult } from "../api/client";
import { DataTable, Empty, Figure, Loaded, Page, Section } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";
import { costsOf, usageOf, type Bucket, type CostResult } from "../usage";

const TimeBars = lazy(() => import("../components/chart"));
const SPANS = [
  { value: "1", label: "24 hours" },
  { value: "7", label: "7 days" },
  { value: "30", label: "30 days" },
  { value: "365", label: "A year" },
];
const GROUPS = [
  { value: "model", label: "Model" },
  { value: "api_key_id", label: "Key" },
  { value: "project_id", label: "Project" },
];
/** ISO 4217's "no currency": a tenant without a price plan. */
const NO_CURRENCY = "XXX";
type Group_ = "model" | "api_key_id" | "project_id";

export default function Usage() {
  const [days, setDays] = useState("7");
  const [group, setGroup] = useState<Group_>("model");
  const nameOf = useNames(group);
  const usage = useQuery({
    queryKey: ["usage", days, [group]],
    queryFn: () => usageOf(Number(days), [group]),
    refetchInterval: 30_000,
    placeholderData: keepPreviousData,
  });
  const costs = useQuery({
    queryKey: ["costs", days, [group]],
    queryFn: () => costsOf(Number(days), [group]),
    refetchInterval: 60_000,
    placeholderData: keepPreviousData,
  });
  const controls = (
    <>
      <SegmentedControl data={GROUPS} value={group} onChange={(value) => setGroup(value as Group_)} aria-label="Divide by" />
      <SegmentedControl data={SPANS} value={days} onChange={setDays} aria-label="Time" />
    </>
  );
  return (
    <Page title="Usage and cost" about="What the ledger has: the bill is made of the same entries." actions={controls}>
      <Loaded query={usage} height={480}>
        {(buckets) => (
          <>
            <Totals buckets={buckets} costs={costs.data} />
            <Section title="Tokens" about={Number(days) <= 3 ? "by hour" : "by day"}>
              {buckets.some((bucket) => bucket.results.length > 0) ? (
                <Suspense fallback={<Skeleton height={260} role="img" aria-label="Loading" />}>
                  <TimeBars
                    label="Tokens over time"
                    hourly={Number(days) <= 3}
                    points={buckets.map((bucket) => ({
                      at: bucket.start_time,
                      values: sums(bucket.results, (row) => nameOf(row[group]), (row) => row.input_tokens + row.output_tokens),
                    }))}
                  />
                </Suspense>
              ) : (
                <Empty icon={IconChartBar} title="No usage in this time">
                  Requests appear here within seconds of their end.
                </Empty>
              )}
            </Section>
            <Costs costs={costs.data} group={group} nameOf={nameOf} />
            <ByGroup buckets={buckets} costs={costs.data} group={group} nameOf={nameOf} />
          </>
        )}
      </Loaded>
    </Page>
  );
}

/** Names of keys and projects by id, where the session may read them. */
function useNames(group: Group_) {
  const { session, viewing } = useSession();
  const sees = (scope: string) => viewing !== null || session.scopes.includes(scope);
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => allKeys(), enabled: group === "api_key_id" && sees("keys") });
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")), enabled: group === "project_id" });
  const listed = group === "api_key_id" ? keys.data : group === "project_id" ? projects.data?.data : undefined;
  const byId = new Map((listed ?? []).map((one) => [one.id, one.name]));
  const none = group === "model" ? "others" : "–";
  return (id: string | null | undefined) => (id ? (byId.get(id) ?? id) : none);
}

function sums<T>(rows: T[], nameOf: (row: T) => string, valueOf: (row: T) => number): Record<string, number> {
  const found: Record<string, number> = {};
  for (const row of rows) found[nameOf(row)] = (found[nameOf(row)] ?? 0) + valueOf(row);
  return found;
}

function spent(costs: Bucket<CostResult>[] | undefined) {
  const rows = (costs ?? []).flatMap((bucket) => bucket.results).filter((row) => row.amount.currency.toUpperCase() !== NO_CURRENCY);
  return { total: rows.reduce((sum, row) => sum + row.amount.value, 0), currency: rows[0]?.amount.currency ?? null };
}

function Totals({ buckets, costs }: { buckets: Bucket<UsageResult>[]; costs: Bucket<CostResult>[] | undefined }) {
  const rows = buckets.flatMap((bucket) => bucket.results);
  const total = (pick: (row: UsageResult) => number) => rows.reduce((sum, row) => sum + pick(row), 0);
  const money = spent(costs);
  const images = total((row) => row.input_image_tokens ?? 0);
  const note = `${format.short(total((row) => row.input_cached_tokens))} from the cache${images > 0 ? `, ${format.short(images)} of images` : ""}`;
  return (
    <SimpleGrid cols={{ base: 2, md: 4 }}>
      <Figure label="Requests" value={format.count(total((row) => row.num_model_requests))} />
      <Figure label="Input" value={format.short(total((row) => row.input_tokens))} unit="tokens" note={note} />
      <Figure label="Output" value={format.short(total((row) => row.output_tokens))} unit="tokens" />
      <Figure label="Cost" value={money.currency ? format.money(money.total, money.currency) : "–"} note={money.currency ? "without tax" : "no price plan"} />
    </SimpleGrid>
  );
}

interface ByGroupProperties {
  costs: Bucket<CostResult>[] | undefined;
  group: Group_;
  nameOf: (id: string | null | undefined) => string;
}

function Costs({ costs, group, nameOf }: ByGroupProperties) {
  const { currency } = spent(costs);
  if (!costs || currency === null) return null;
  return (
    <Section title="Cost" about="by day (UTC); days of an open month can still change">
      <Suspense fallback={<Skeleton height={260} role="img" aria-label="Loading" />}>
        <TimeBars
          label="Cost over time"
          hourly={false}
          show={(value) => format.money(value, currency)}
          points={costs.map((bucket) => ({
            at: bucket.start_time,
            values: sums(bucket.results, (row) => nameOf(row[group]), (row) => row.amount.value),
          }))}
        />
      </Suspense>
    </Section>
  );
}

function ByGroup({ buckets, costs, group, nameOf }: ByGroupProperties & { buckets: Bucket<UsageResult>[] }) {
  const rows = buckets.flatMap((bucket) => bucket.results);
  const money = (costs ?? []).flatMap((bucket) => bucket.results);
  const { currency } = spent(costs);
  const byId = new Map<string, { id: string; requests: number; input: number; cached: number; images: number; output: number; cost: number }>();
  const of = (id: string) => {
    const known = byId.get(id) ?? { id, requests: 0, input: 0, cached: 0, images: 0, output: 0, cost: 0 };
    byId.set(id, known);
    return known;
  };
  for (const row of rows) {
    const sum = of(row[group] ?? "");
    sum.requests += row.num_model_requests;
    sum.input += row.input_tokens;
    sum.cached += row.input_cached_tokens;
    sum.images += row.input_image_tokens ?? 0;
    sum.output += row.output_tokens;
  }
  for (const row of money) {
    const sum = byId.get(row[group] ?? "");
    if (sum) sum.cost += row.amount.value;
  }
  const table = [...byId.values()]
    .sort((a, b) => b.input + b.output - a.input - a.output);
  if (table.length === 0) return null;
  return (
    <Section title={`By ${GROUPS.find((one) => one.value === group)!.label.toLowerCase()}`}>
      <DataTable
        label="Usage by group"
        rows={table.slice(0, 200)}
        keyOf={(row) => row.id}
        columns={[
          { title: "Name", cell: (row) => nameOf(row.id) },
          { title: "Requests", number: true, cell: (row) => format.count(row.requests) },
          { title: "Input tokens", number: true, cell: (row) => format.count(row.input) },
          { title: "Cached", number: true, cell: (row) => format.count(row.cached) },
          { title: "Of images", number: true, cell: (row) => format.count(row.images) },
          { title: "Output tokens", number: true, cell: (row) => format.count(row.output) },
          ...(currency ? [{ title: "Cost", number: true, cell: (row: { cost: number }) => format.money(row.cost, currency) }] : []),
        ]}
      />
      {table.length > 200 && (
        <Group mt="sm">
          <Text size="sm" c="dimmed">
            The 200 with the most tokens of {format.count(table.length)}.
          </Text>
        </Group>
      )}
    </Section>
  );
}
