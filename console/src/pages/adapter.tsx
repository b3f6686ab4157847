import { Anchor, Badge, Button, Code, Group, SimpleGrid, Slider, Stack, Tabs, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconUpload } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useState } from "react";
import { Link, useLocation } from "wouter";
import { api, unwrap, type Adapter as AdapterObject, type AliasObject, type RevisionObject } from "../api/client";
import { complain, Confirm, Copy, DataTable, Figure, Loaded, Page, report, Section, State, When } from "../components/ui";
import { Evaluations, Protection } from "../components/quality";
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
          report(`${name} is deleted. For a while it can be restored with "loramux adapter undelete".`);
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
          <Section title="Revisions" about="Immutable, newest first.">
            <Loaded query={revisions}>{(listed) => <Revisions name={name} rows={listed.data} />}</Loaded>
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
        <Tabs.Panel value="requests">
          <Requests name={name} isAllowed={can("usage") || viewing !== null} />
        </Tabs.Panel>
      </Tabs>
    </Page>
  );
}

interface ReleaseProperties {
  name: string;
  alias: AliasObject;
  revisions: RevisionObject[];
  mayChange: boolean;
}

/** One alias: its targets, a canary by slider, promote, roll back, history. */
function Release({ name, alias, revisions, mayChange }: ReleaseProperties) {
  const queries = useQueryClient();
  const path = { name, alias: alias.name };
  const history = useQuery({
    queryKey: ["adapter", name, "history", alias.name, alias.version],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}/aliases/{alias}/history", { params: { path } })),
  });
  const whole = alias.targets.reduce((sum, target) => sum + target.weight, 0);
  const targets = [...alias.targets].sort((a, b) => b.revision - a.revision);
  const stable = targets.at(-1)!;
  const ready = revisions.filter((revision) => revision.state === "ready").map((revision) => revision.revision);
  const isCanary = targets.length > 1;
  const newest = isCanary ? targets[0]!.revision : Math.max(...ready.filter((one) => one !== stable.revision), 0);

  async function changed(doing: Promise<unknown>, message: string) {
    await doing;
    await queries.invalidateQueries({ queryKey: ["adapter"] });
    report(message);
  }
  const point = (weights: { revision: number; weight: number }[], message: string) =>
    changed(unwrap(api.PUT("/v1/adapters/{name}/aliases/{alias}", { params: { path }, body: { targets: weights } })), message);
  const promote = (revision: number) =>
    changed(
      unwrap(api.POST("/v1/adapters/{name}/promote", { params: { path: { name } }, body: { revision, alias: alias.name } })),
      `@${revision} answers alone now`,
    );
  const rollBack = () =>
    changed(unwrap(api.POST("/v1/adapters/{name}/aliases/{alias}/rollback", { params: { path } })), "Rolled back");

  return (
    <Section
      title={alias.name === DEFAULT ? "Default alias" : `Alias ${alias.name}`}
      about={alias.name === DEFAULT ? "What requests without an alias get." : `What requests to ${name}:${alias.name} get.`}
      actions={
        mayChange && (
          <Group gap="xs">
            <Confirm label="Roll back" title="Roll back?" act={rollBack} disabled={(history.data?.data.length ?? 0) < 2} color="orange">
              The alias gets the targets that it had before the last change.
            </Confirm>
            {isCanary && (
              <Button size="xs" onClick={() => void promote(newest).catch(complain)}>
                Promote @{newest}
              </Button>
            )}
          </Group>
        )
      }
    >
      <Stack gap="md">
        {targets.map((target) => (
          <Share key={target.revision} revision={target.revision} part={target.weight / whole} isNew={isCanary && target.revision === newest} />
        ))}
        {mayChange && newest > 0 && (
          <Canary
            key={`${alias.version}`}
            newest={newest}
            stable={stable.revision}
            now={isCanary ? Math.round((100 * targets[0]!.weight) / whole) : 0}
            apply={(weight) =>
              point(
                weight === 0
                  ? [{ revision: stable.revision, weight: 1 }]
                  : weight === 100
                    ? [{ revision: newest, weight: 1 }]
                    : [
                        { revision: stable.revision, weight: 100 - weight },
                        { revision: newest, weight },
                      ],
                weight === 0 ? "The canary is taken back" : `@${newest} gets ${weight}%`,
              )
            }
          />
        )}
        <Protection name={name} alias={alias.name} candidate={newest} mayChange={mayChange} />
        <Loaded query={history} height={120}>
          {(versions) => (
            <DataTable
              label={`History of ${alias.name}`}
              rows={versions.data}
              keyOf={(version) => `${version.version}`}
              minWidth={480}
              columns={[
                { title: "Change", width: 80, cell: (version) => `#${version.version}` },
                {
                  title: "Targets",
                  cell: (version) =>
                    version.targets.map((target) => `@${target.revision} × ${target.weight}`).join(", ") || "removed",
                },
                { title: "By", cell: (version) => <Text size="sm" ff="monospace" className="long">{version.changed_by_name ?? version.changed_by}</Text> },
                { title: "When", width: 140, number: true, cell: (version) => <When at={version.changed_at} /> },
              ]}
            />
          )}
        </Loaded>
      </Stack>
    </Section>
  );
}

function Share({ revision, part, isNew }: { revision: number; part: number; isNew: boolean }) {
  return (
    <Group gap="md" wrap="nowrap">
      <Text fw={600} w={64} className="figure">
        @{revision}
      </Text>
      <div style={{ flex: 1, background: "var(--mantine-color-default-border)", borderRadius: 4 }}>
        <div
          style={{
            width: `${part * 100}%`,
            minWidth: 4,
            height: 12,
            borderRadius: 4,
            background: isNew ? "var(--mantine-color-orange-6)" : "var(--mantine-color-teal-6)",
          }}
        />
      </div>
      <Text w={64} ta="right" className="figure">
        {format.share(part)}
      </Text>
      <Badge color={isNew ? "orange" : "teal"} w={72}>
        {isNew ? "canary" : "stable"}
      </Badge>
    </Group>
  );
}

function Canary(properties: { newest: number; stable: number; now: number; apply: (weight: number) => Promise<void> }) {
  const { newest, stable, now, apply } = properties;
  const [weight, setWeight] = useState(now);
  const [isBusy, setBusy] = useState(false);
  return (
    <Group align="center" gap="xl" pt="xs">
      <div style={{ flex: "1 1 280px", paddingBottom: 20 }}>
        <Text size="sm" mb={6} id={`canary-${newest}`}>
          Share of requests for <b>@{newest}</b>, the rest for <b>@{stable}</b>. One user always gets the same revision.
        </Text>
        <Slider
          value={weight}
          onChange={setWeight}
          step={1}
          label={(value) => `${value}%`}
          marks={[0, 25, 50, 75, 100].map((value) => ({ value, label: `${value}%` }))}
          thumbLabel={`Percent of requests for revision ${newest}`}
        />
      </div>
      <Button
        disabled={weight === now}
        loading={isBusy}
        onClick={() => {
          setBusy(true);
          void apply(weight)
            .catch(complain)
            .finally(() => setBusy(false));
        }}
      >
        {weight === 0 ? "Take the canary back" : weight === 100 ? `Promote @${newest}` : `Give it ${weight}%`}
      </Button>
    </Group>
  );
}

function Revisions({ name, rows }: { name: string; rows: RevisionObject[] }) {
  const { can } = useSession();
  const queries = useQueryClient();
  async function pin(row: RevisionObject) {
    const params = { path: { name, revision: `${row.revision}` } };
    await unwrap(row.pin ? api.DELETE("/v1/adapters/{name}/pins/{revision}", { params }) : api.PUT("/v1/adapters/{name}/pins/{revision}", { params }));
    await queries.invalidateQueries({ queryKey: ["adapter"] });
    report(row.pin ? `@${row.revision} is loaded on request again` : `@${row.revision} stays in memory until you let go of it`);
  }
  return (
    <DataTable
      label="Revisions"
      rows={rows}
      keyOf={(row) => row.id}
      minWidth={820}
      columns={[
        { title: "Revision", width: 90, cell: (row) => <b>@{row.revision}</b> },
        { title: "State", width: 100, cell: (row) => <State value={row.state} /> },
        { title: "Aliases", cell: (row) => row.aliases.map((alias) => <Badge key={alias} mr={4} color="gray">{alias}</Badge>) },
        { title: "Rank", number: true, width: 70, cell: (row) => format.count(row.rank) },
        { title: "Size", number: true, width: 100, cell: (row) => format.bytes(row.size_bytes) },
        {
          title: "Digest",
          width: 170,
          cell: (row) => (
            <Group gap={2} wrap="nowrap">
              <Text size="xs" ff="monospace">{row.digest.slice(0, 12)}…</Text>
              <Copy value={row.digest} label="Copy the digest" />
            </Group>
          ),
        },
        { title: "Uploaded", width: 130, number: true, cell: (row) => <When at={row.created_at} /> },
        {
          title: "Memory",
          width: 130,
          cell: (row) =>
            can("adapters") && row.state === "ready" ? (
              <Confirm
                label={row.pin ? "Let go" : "Pin"}
                color="teal"
                title={row.pin ? `Let go of @${row.revision}?` : `Keep @${row.revision} in memory?`}
                act={() => pin(row)}
              >
                {row.pin
                  ? "It is then loaded on request, like any other."
                  : "It answers without loading first. Its memory is charged until you let go of it."}
              </Confirm>
            ) : row.pin ? (
              "pinned"
            ) : null,
        },
      ]}
    />
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
              minWidth={860}
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
