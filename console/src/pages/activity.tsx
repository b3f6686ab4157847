import { Button, Code, Group, Stack, Tabs, Text } from "@mantine/core";
import { IconActivity } from "@tabler/icons-react";
import { useInfiniteQuery } from "@tanstack/react-query";
import { api, unwrap } from "../api/client";
import { DataTable, Empty, Failure, Page, Section, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const PAGE = 50;

/** Events of adapters, and the audit log: who changed what, from where. */
export default function Activity() {
  const { session, viewing } = useSession();
  const seesAudit = viewing !== null || session.scopes.includes("audit");
  return (
    <Page title="Activity" about="What happened to this tenant's adapters, and who changed what.">
      <Tabs defaultValue="events" keepMounted={false}>
        <Tabs.List mb="lg">
          <Tabs.Tab value="events">Events</Tabs.Tab>
          {seesAudit && <Tabs.Tab value="audit">Audit log</Tabs.Tab>}
        </Tabs.List>
        <Tabs.Panel value="events">
          <Events />
        </Tabs.Panel>
        <Tabs.Panel value="audit">
          <Audit />
        </Tabs.Panel>
      </Tabs>
    </Page>
  );
}

function Events() {
  const events = useInfiniteQuery({
    queryKey: ["events", "all"],
    queryFn: ({ pageParam }) => unwrap(api.GET("/v1/events", { params: { query: { limit: PAGE, before: pageParam } } })),
    initialPageParam: undefined as string | undefined,
    getNextPageParam: (page) => (page.data.length === PAGE ? page.data.at(-1)!.id : undefined),
    refetchInterval: 15_000,
  });
  const rows = events.data?.pages.flatMap((page) => page.data) ?? [];
  if (events.error) return <Failure error={events.error} />;
  return (
    <Section title="Events" about="Kept for 90 days.">
      {rows.length === 0 ? (
        <Empty icon={IconActivity} title="Nothing has happened yet">
          Uploads, releases and canaries are listed here, and sent to your webhooks.
        </Empty>
      ) : (
        <DataTable
          label="Events"
          rows={rows}
          keyOf={(event) => event.id}
          columns={[
            { title: "Event", width: 200, cell: (event) => <b>{event.type}</b> },
            { title: "About", cell: (event) => event.data.model ?? event.data.adapter ?? "" },
            { title: "Why", cell: (event) => event.data.error?.message ?? (event.data.canary ? numbersOf(event.data.canary) : "") },
            { title: "When", width: 150, number: true, cell: (event) => <When at={event.created_at} /> },
          ]}
        />
      )}
      <More has={events.hasNextPage} load={() => void events.fetchNextPage()} />
    </Section>
  );
}

interface CanaryNumbers {
  measure: string;
  candidate: number[];
  before: number[];
}

/** The good outcomes of a canary that its guard has taken back, and of the revisions before it. */
function numbersOf({ measure, candidate, before }: CanaryNumbers): string {
  const rate = ([good, all]: number[]) => `${format.count(good ?? 0)} of ${format.count(all ?? 0)}`;
  return `${measure}: ${rate(candidate)} were good, ${rate(before)} before`;
}

function Audit() {
  const log = useInfiniteQuery({
    queryKey: ["audit"],
    queryFn: ({ pageParam }) => unwrap(api.GET("/v1/audit", { params: { query: { limit: PAGE, before: pageParam } } })),
    initialPageParam: undefined as number | undefined,
    getNextPageParam: (page) => (page.data.length === PAGE ? page.data.at(-1)!.sequence : undefined),
    refetchInterval: 30_000,
  });
  const rows = log.data?.pages.flatMap((page) => page.data) ?? [];
  if (log.error) return <Failure error={log.error} />;
  return (
    <Section title="Audit log" about="Every change of access, limits and releases, in one transaction with the change itself.">
      <DataTable
        label="Audit log"
        rows={rows}
        keyOf={(entry) => `${entry.sequence}`}
        columns={[
          { title: "Change", width: 150, cell: (entry) => <b>{entry.action}</b> },
          {
            title: "Of",
            cell: (entry) => (
              <details>
                <summary>
                  <Text size="xs" ff="monospace" span className="long">
                    {entry.object_id}
                  </Text>
                </summary>
                <Stack gap={4} mt={4}>
                  {(["before", "after"] as const).map(
                    (side) =>
                      entry[side] != null && (
                        <Code block key={side} className="long">
                          {side}: {JSON.stringify(entry[side], null, 1)}
                        </Code>
                      ),
                  )}
                </Stack>
              </details>
            ),
          },
          { title: "By", cell: (entry) => entry.actor_name ?? entry.actor },
          { title: "From", cell: (entry) => entry.source },
          { title: "When", width: 140, number: true, cell: (entry) => <When at={entry.at} /> },
        ]}
      />
      <More has={log.hasNextPage} load={() => void log.fetchNextPage()} />
    </Section>
  );
}

function More({ has, load }: { has: boolean; load: () => void }) {
  return (
    has && (
      <Group justify="center" mt="md">
        <Button variant="default" onClick={load}>
          Older
        </Button>
      </Group>
    )
  );
}
