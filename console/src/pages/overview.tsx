import { Anchor, Button, Code, Grid, SimpleGrid, Skeleton, Stack, Text } from "@mantine/core";
import { IconChartBar, IconStack2 } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { lazy, Suspense } from "react";
import { Link } from "wouter";
import { adaptersOf, api, unwrap, type UsageResult } from "../api/client";
import { Empty, Figure, Loaded, Page, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";
import { usageOf } from "../usage";

const TimeBars = lazy(() => import("../components/chart"));
const SHOWN = 6;

/** A tenant's home: what it served lately, and its adapters. */
export function Overview() {
  const { tenant, session, viewing } = useSession();
  const seesUsage = session.scopes.includes("usage") || viewing !== null;
  return (
    <Page title={tenant} about="The last 24 hours, and what answers now.">
      {seesUsage && <Served />}
      <Grid gap="lg">
        <Grid.Col span={{ base: 12, md: 7 }}>
          <Latest />
        </Grid.Col>
        <Grid.Col span={{ base: 12, md: 5 }}>
          <Stack gap="lg">
            <Events />
            <FirstCall />
          </Stack>
        </Grid.Col>
      </Grid>
    </Page>
  );
}

function Served() {
  const usage = useQuery({ queryKey: ["usage", 1, ["model"]], queryFn: () => usageOf(1, ["model"]), refetchInterval: 15_000 });
  return (
    <>
      <Loaded query={usage} height={104}>
        {(buckets) => {
          const rows = buckets.flatMap((bucket) => bucket.results);
          const total = (pick: (row: (typeof rows)[number]) => number) => rows.reduce((sum, row) => sum + pick(row), 0);
          const input = total((row) => row.input_tokens);
          const cached = total((row) => row.input_cached_tokens);
          return (
            <SimpleGrid cols={{ base: 2, md: 4 }}>
              <Figure label="Requests" value={format.count(total((row) => row.num_model_requests))} note="in 24 hours" />
              <Figure label="Input" value={format.short(input)} unit="tokens" note={input > 0 && `${format.share(cached / input)} from the cache`} />
              <Figure label="Output" value={format.short(total((row) => row.output_tokens))} unit="tokens" />
              <Figure label="Models used" value={modelsOf(rows)} />
            </SimpleGrid>
          );
        }}
      </Loaded>
      <Section title="Tokens by model" actions={<Anchor component={Link} href="/usage" size="sm">All usage</Anchor>}>
        <Loaded query={usage} height={260}>
          {(buckets) => {
            const points = buckets.map((bucket) => ({
              at: bucket.start_time,
              values: Object.fromEntries(bucket.results.map((row) => [row.model ?? "others", row.input_tokens + row.output_tokens])),
            }));
            if (!buckets.some((bucket) => bucket.results.length > 0)) {
              return (
                <Empty icon={IconChartBar} title="No requests yet">
                  Send one with a key of yours, or try the playground. Usage appears here within seconds.
                </Empty>
              );
            }
            return (
              <Suspense fallback={<Skeleton height={260} role="img" aria-label="Loading" />}>
                <TimeBars label="Tokens by model and hour" points={points} hourly />
              </Suspense>
            );
          }}
        </Loaded>
      </Section>
    </>
  );
}

/** How many models answered; with more than the server names, at least so many. */
function modelsOf(rows: UsageResult[]): string {
  const models = new Set(rows.map((row) => row.model));
  const named = format.count([...models].filter((model) => model !== null).length);
  return models.has(null) ? `more than ${named}` : named;
}

function Latest() {
  const { tenant } = useSession();
  const adapters = useQuery({
    queryKey: ["adapters", "first", tenant],
    queryFn: () => unwrap(api.GET("/v1/adapters", { params: { query: { limit: SHOWN } } })),
    refetchInterval: 10_000,
  });
  return (
    <Section title="Adapters" actions={<Anchor component={Link} href="/adapters" size="sm">All adapters</Anchor>}>
      <Loaded query={adapters}>
        {(page) =>
          page.data.length === 0 ? (
            <Empty
              icon={IconStack2}
              title="No adapter yet"
              action={<Button component={Link} href="/adapters?upload">Upload an adapter</Button>}
            >
              An adapter is a fine-tune that PEFT has saved: adapter_config.json and adapter_model.safetensors.
            </Empty>
          ) : (
            <Stack gap={0}>
              {adaptersOf(page).map((adapter) => (
                <Row key={adapter.id} name={adapter.name} revision={adapter.revision} state={adapter.state} at={adapter.created_at} />
              ))}
              {page.has_more && (
                <Text size="sm" c="dimmed" mt="sm">
                  and more
                </Text>
              )}
            </Stack>
          )
        }
      </Loaded>
    </Section>
  );
}

function Row({ name, revision, state, at }: { name: string; revision: number; state: string; at: number }) {
  return (
    <Grid py={8} align="center" gap="xs">
      <Grid.Col span={5} className="long">
        <Link href={`/adapters/${format.localName(name)}`} className="row-link">
          {format.localName(name)}
        </Link>
      </Grid.Col>
      <Grid.Col span={3}>
        <State value={state} />
      </Grid.Col>
      <Grid.Col span={4} ta="right">
        <Text size="sm" c="dimmed" component="span">
          @{revision} · <When at={at} />
        </Text>
      </Grid.Col>
    </Grid>
  );
}

function Events() {
  const events = useQuery({
    queryKey: ["events", "latest"],
    queryFn: () => unwrap(api.GET("/v1/events", { params: { query: { limit: SHOWN } } })),
    refetchInterval: 10_000,
  });
  return (
    <Section title="Events" actions={<Anchor component={Link} href="/activity" size="sm">All activity</Anchor>}>
      <Loaded query={events} height={120}>
        {(page) =>
          page.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              Uploads, releases and canaries will be listed here.
            </Text>
          ) : (
            <Stack gap="xs">
              {page.data.map((event) => (
                <Text key={event.id} size="sm" className="long">
                  <Text span fw={550} size="sm">
                    {event.type}
                  </Text>{" "}
                  {event.data.model ?? event.data.adapter} · <When at={event.created_at} />
                </Text>
              ))}
            </Stack>
          )
        }
      </Loaded>
    </Section>
  );
}

function FirstCall() {
  const { session, tenant } = useSession();
  const model = session.base_models[0] ?? `${tenant}/adapter`;
  return (
    <Section title="Call it" about="OpenAI's API: point a client at this server.">
      <Code block className="long" tabIndex={0} aria-label="A request with curl">
        {`curl ${location.origin}\\
/v1/chat/completions \\
  -H "Authorization: Bearer $KEY" \\
  -H "Content-Type: application/json" \\
  -d '{"model": "${model}", "messages":
       [{"role": "user", "content": "Hello"}]}'`}
      </Code>
    </Section>
  );
}

