import { Anchor, Autocomplete, Badge, Button, Code, Group, SimpleGrid, Stack, Tabs, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconUpload } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useState } from "react";
import { Link, useLocation } from "wouter";
import { api, unwrap, type Adapter as AdapterObject, type RevisionObject } from "../api/client";
import { Evaluations } from "../components/quality";
import { Release } from "../components/release";
import { Grants, Shadow } from "../components/sharing";
import { Actions, complain, Confirm, Copy, DataTable, Dialog, Figure, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const Upload = lazy(() => import("../components/upload"));
const DEFAULT = "default";

/** One adapter: which revision answers, releases, its revisions, how they serve. */
export function Adapter({ name }: { name: string }) {
  const { can, tenant, viewing } = useSession();
  const [, navigate] = useLocation();
  const [isUploading, upload] = useDisclosure();
  const queries = useQueryClient();
  const path = { name };
  const adapter = useQuery({
    queryKey: ["adapter", tenant, name],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}", { params: { path } })) as Promise<AdapterObject>,
    refetchInterval: 10_000,
  });
  const revisions = useQuery({
    queryKey: ["adapter", tenant, name, "revisions"],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}/revisions", { params: { path } })),
    refetchInterval: 10_000,
  });
  const actions = can("adapters") && (
    <>
      <Confirm
        label="Delete"
        size="sm"
        title={`Delete ${tenant}/${name}?`}
        act={async () => {
          await unwrap(api.DELETE("/v1/adapters/{name}", { params: { path } }));
          await queries.invalidateQueries();
          report(`${name} is deleted. For a while it can be restored here`);
          navigate("/adapters");
        }}
      >
        All its revisions stop answering; requests under way finish.
      </Confirm>
      <Button leftSection={<IconUpload size={16} />} onClick={upload.open}>
        New revision
      </Button>
    </>
  );
  return (
    <Page
      title={name}
      about={
        <Group gap={4} component="span">
          <Anchor component={Link} href="/adapters" size="sm">
            Adapters
          </Anchor>
          <Text span c="dimmed" size="sm">
            / model name
          </Text>
          <Code className="long">{`${tenant}/${name}`}</Code>
          <Copy value={`${tenant}/${name}`} label="Copy the model's name" />
        </Group>
      }
      actions={actions}
    >
      {isUploading && (
        <Suspense>
          <Upload adapter={name} onClose={upload.close} />
        </Suspense>
      )}
      <Loaded query={adapter} height={104}>
        {(found) => (
          <SimpleGrid cols={{ base: 2, md: 4 }}>
            <Figure label="State" value={found.state} color={found.state === "ready" ? "teal" : undefined} />
            <Figure label="Answers" value={`@${found.revision}`} note="largest share of the default alias" />
            <Figure label="Rank" value={format.count(found.rank)} />
            <Figure label="Size" value={format.bytes(found.size_bytes).split(" ")[0]} unit={format.bytes(found.size_bytes).split(" ")[1]} />
          </SimpleGrid>
        )}
      </Loaded>
      <Tabs defaultValue="release" keepMounted={false}>
        <Tabs.List mb="lg" className="tabs">
          <Tabs.Tab value="release">Release</Tabs.Tab>
          <Tabs.Tab value="revisions">Revisions</Tabs.Tab>
          <Tabs.Tab value="evaluations">Evaluations</Tabs.Tab>
          <Tabs.Tab value="metrics">Metrics</Tabs.Tab>
          <Tabs.Tab value="shadow">Shadow</Tabs.Tab>
          <Tabs.Tab value="sharing">Sharing</Tabs.Tab>
          <Tabs.Tab value="requests">Requests</Tabs.Tab>
        </Tabs.List>
        <Tabs.Panel value="release">
          <Loaded query={adapter}>
            {(found) => (
              <Loaded query={revisions}>
                {(listed) => (
                  <Stack gap="lg">
                    {found.aliases.map((alias) => (
                      <Release key={alias.name} name={name} alias={alias} revisions={listed.data} mayChange={can("adapters")} />
                    ))}
                  </Stack>
                )}
              </Loaded>
            )}
          </Loaded>
        </Tabs.Panel>
        <Tabs.Panel value="revisions">
          <Section title="Revisions" about="Immutable, newest first. A deleted one can be restored for a while.">
            <Loaded query={revisions}>{(listed) => <Revisions name={name} aliases={(adapter.data?.aliases ?? []).map((one) => one.name)} rows={listed.data} />}</Loaded>
          </Section>
        </Tabs.Panel>
        <Tabs.Panel value="evaluations">
          {can("inference") ? (
            <Loaded query={revisions}>{(listed) => <Evaluations name={name} revisions={listed.data} mayStart={can("inference")} />}</Loaded>
          ) : (
            <Text>Evaluations need the scope "inference".</Text>
          )}
        </Tabs.Panel>
        <Tabs.Panel value="metrics">
          <Metrics name={name} />
        </Tabs.Panel>
        <Tabs.Panel value="shadow">
          <Loaded query={revisions}>{(listed) => <Shadow name={name} revisions={listed.data} mayChange={can("adapters")} />}</Loaded>
        </Tabs.Panel>
        <Tabs.Panel value="sharing">
          <Grants name={name} mayChange={can("adapters")} />
        </Tabs.Panel>
        <Tabs.Panel value="requests">
          <Requests name={name} isAllowed={can("usage") || viewing !== null} />
        </Tabs.Panel>
      </Tabs>
    </Page>
  );
}

function Revisions({ name, aliases, rows }: { name: string; aliases: string[]; rows: RevisionObject[] }) {
  const { can } = useSession();
  return (
    <DataTable
      label="Revisions"
      rows={rows}
      keyOf={(row) => row.id}
      columns={[
        { title: "Revision", width: 80, cell: (row) => <b>@{row.revision}</b> },
        { title: "State", width: 90, cell: (row) => <State value={row.state} /> },
        {
          title: "Aliases",
          width: 120,
          cell: (row) => (
            <Group gap={4}>
              {row.aliases.map((alias) => (
                <Badge key={alias} color="gray">
                  {alias}
                </Badge>
              ))}
              {row.pin && <Badge color="indigo">pinned</Badge>}
            </Group>
          ),
        },
        { title: "Rank", number: true, width: 60, cell: (row) => format.count(row.rank) },
        { title: "Size", number: true, width: 80, cell: (row) => format.bytes(row.size_bytes) },
        {
          title: "Digest",
          width: 150,
          cell: (row) => (
            <Group gap={2} wrap="nowrap">
              <Text size="xs" ff="monospace">{row.digest.slice(0, 12)}…</Text>
              <Copy value={row.digest} label="Copy the digest" />
            </Group>
          ),
        },
        { title: "Uploaded", width: 140, number: true, cell: (row) => <When at={row.created_at} /> },
        { title: "Action", width: 230, actions: true, cell: (row) => can("adapters") && <RevisionActions name={name} row={row} aliases={aliases} /> },
      ]}
    />
  );
}

/** Promote, keep in memory, delete; or restore one that is deleted. */
function RevisionActions({ name, row, aliases }: { name: string; row: RevisionObject; aliases: string[] }) {
  const queries = useQueryClient();
  const params = { path: { name, revision: `${row.revision}` } };
  async function changed(doing: Promise<unknown>, message: string) {
    await doing;
    await queries.invalidateQueries({ queryKey: ["adapter"] });
    report(message);
  }
  if (row.state === "deleted") {
    const undelete = () => api.POST("/v1/adapters/{name}/undelete", { params: { path: { name }, query: { revision: row.revision } } });
    return (
      <Actions>
        <Text size="xs" c="dimmed">
          until {row.undo_until === null ? "it is purged" : format.date(row.undo_until)}
        </Text>
        <Button size="xs" variant="default" onClick={() => void changed(unwrap(undelete()), `@${row.revision} is restored`).catch(complain)}>
          Restore
        </Button>
      </Actions>
    );
  }
  const pin = () => (row.pin ? api.DELETE("/v1/adapters/{name}/pins/{revision}", { params }) : api.PUT("/v1/adapters/{name}/pins/{revision}", { params }));
  const pinned = row.pin ? `@${row.revision} is loaded on request again` : `@${row.revision} stays in memory until you let go of it`;
  return (
    <Actions>
      <Promote name={name} revision={row.revision} aliases={aliases} changed={changed} />
      <Confirm
        label={row.pin ? "Let go" : "Pin"}
        color="teal"
        title={row.pin ? `Let go of @${row.revision}?` : `Keep @${row.revision} in memory?`}
        act={() => changed(unwrap(pin()), pinned)}
      >
        {row.pin ? "It is then loaded on request, like any other." : "It answers without loading first. Its memory is charged until you let go of it."}
      </Confirm>
      {row.aliases.length === 0 && (
        <Confirm
          label="Delete"
          title={`Delete @${row.revision}?`}
          act={() => changed(unwrap(api.DELETE("/v1/adapters/{name}/revisions/{revision}", { params })), `@${row.revision} is deleted. For a while it can be restored here`)}
        >
          It stops answering to its number; requests under way finish.
        </Confirm>
      )}
    </Actions>
  );
}

interface PromoteProperties {
  name: string;
  revision: number;
  aliases: string[];
  changed: (doing: Promise<unknown>, message: string) => Promise<void>;
}

/** Point an alias at one revision alone: an alias that exists, or a new one. */
function Promote({ name, revision, aliases, changed }: PromoteProperties) {
  const [isOpen, window] = useDisclosure();
  const [alias, setAlias] = useState(DEFAULT);
  const promote = () => api.POST("/v1/adapters/{name}/promote", { params: { path: { name } }, body: { revision, alias: alias.trim() } });
  return (
    <>
      <Button size="xs" variant="default" onClick={window.open}>
        Promote
      </Button>
      {isOpen && (
        <Dialog title={`Promote @${revision}`} submit={`Promote @${revision}`} disabled={!alias.trim()} act={() => changed(unwrap(promote()), `@${revision} answers alone now`)} onClose={window.close}>
          <Text size="sm">All requests to the alias are answered by it from now on. A release policy of the alias must be passed.</Text>
          <Autocomplete label="Alias" description="One that exists, or a new one" data={aliases} value={alias} onChange={setAlias} />
        </Dialog>
      )}
    </>
  );
}

function Metrics({ name }: { name: string }) {
  const [window, setWindow] = useState<"1h" | "24h" | "7d" | "30d">("24h");
  const metrics = useQuery({
    queryKey: ["adapter", name, "metrics", window],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}/metrics", { params: { path: { name }, query: { window } } })),
    refetchInterval: 10_000,
  });
  const spans = (
    <Group gap={4}>
      {(["1h", "24h", "7d", "30d"] as const).map((one) => (
        <Button key={one} size="xs" variant={one === window ? "filled" : "default"} aria-pressed={one === window} onClick={() => setWindow(one)}>
          {one}
        </Button>
      ))}
    </Group>
  );
  return (
    <Section title="How the revisions serve" about="Compare a canary with the revision that it may replace." actions={spans}>
      <Loaded query={metrics}>
        {(found) =>
          found.data.length === 0 ? (
            <Text c="dimmed" size="sm">
              No requests in this time.
            </Text>
          ) : (
            <DataTable
              label="Metrics of revisions"
              rows={found.data}
              keyOf={(row) => row.model}
              columns={[
                { title: "Revision", cell: (row) => <b>@{row.model.split("@")[1]}</b> },
                { title: "Requests", number: true, cell: (row) => format.count(row.requests) },
                { title: "Failed", number: true, cell: (row) => format.share(row.requests ? row.failed / row.requests : 0) },
                { title: "First token, p50", number: true, cell: (row) => format.duration(row.first_token_seconds.p50) },
                { title: "First token, p99", number: true, cell: (row) => format.duration(row.first_token_seconds.p99) },
                { title: "Tokens/s", number: true, cell: (row) => row.tokens_per_second?.toFixed(1) ?? "–" },
                { title: "Output tokens", number: true, cell: (row) => format.count(row.output_tokens) },
                {
                  title: "Feedback",
                  number: true,
                  cell: (row) => (row.feedback.mean_score == null ? "–" : `${format.share(row.feedback.mean_score)} of ${row.feedback.count}`),
                },
              ]}
            />
          )
        }
      </Loaded>
    </Section>
  );
}

function Requests({ name, isAllowed }: { name: string; isAllowed: boolean }) {
  const { tenant } = useSession();
  const requests = useQuery({
    enabled: isAllowed,
    queryKey: ["adapter", name, "requests"],
    queryFn: () => unwrap(api.GET("/v1/requests", { params: { query: { adapter: `${tenant}/${name}`, limit: 50 } } })),
    refetchInterval: 5_000,
  });
  if (!isAllowed) return <Text>Your key lacks the scope "usage".</Text>;
  return (
    <Section title="Latest requests" about="Without prompts and answers: those are not stored.">
      <Loaded query={requests}>
        {(found) =>
          found.data.length === 0 ? (
            <Text c="dimmed" size="sm">
              No requests yet. Try it in the <Anchor component={Link} href={`/playground?model=${tenant}/${name}`}>playground</Anchor>.
            </Text>
          ) : (
            <DataTable
              label="Requests"
              rows={found.data}
              keyOf={(row) => row.id}
              columns={[
                { title: "Request", cell: (row) => <Text size="xs" ff="monospace" className="long">{row.id}</Text> },
                { title: "Revision", cell: (row) => `@${String(row.model).split("@")[1] ?? ""}` },
                { title: "Status", cell: (row) => String(row.status) },
                { title: "When", number: true, cell: (row) => <When at={row.created_at} /> },
              ]}
            />
          )
        }
      </Loaded>
    </Section>
  );
}
