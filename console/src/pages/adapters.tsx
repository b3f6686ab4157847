import { Button, Group, Text, TextInput } from "@mantine/core";
import { useDebouncedValue, useDisclosure } from "@mantine/hooks";
import { IconSearch, IconStack2, IconUpload } from "@tabler/icons-react";
import { keepPreviousData, useQuery, useQueryClient } from "@tanstack/react-query";
import { lazy, Suspense, useState } from "react";
import { Link } from "wouter";
import { adaptersOf, api, unwrap, type Adapter, type TrainingAdapter } from "../api/client";
import { complain, DataTable, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const Upload = lazy(() => import("../components/upload"));
const PAGE = 50;

/** A tenant's adapters, a page at a time: there may be ten thousand. */
export function Adapters() {
  const { can, tenant } = useSession();
  const [path, setPath] = useState<string[]>([]);
  const after = path.at(-1);
  const [typed, setTyped] = useState("");
  const [search] = useDebouncedValue(typed.trim(), 250);
  const [isUploading, upload] = useDisclosure(location.search === "?upload");
  const adapters = useQuery({
    queryKey: ["adapters", "page", tenant, after, search],
    queryFn: () => unwrap(api.GET("/v1/adapters", { params: { query: { limit: PAGE, after, search: search || undefined } } })),
    refetchInterval: 10_000,
    placeholderData: keepPreviousData,
  });
  const open = (
    <Button leftSection={<IconUpload size={16} />} onClick={upload.open}>
      Upload an adapter
    </Button>
  );
  return (
    <Page title="Adapters" about="Fine-tunes that this server answers with, by name." actions={can("adapters") && open}>
      {isUploading && (
        <Suspense>
          <Upload onClose={upload.close} />
        </Suspense>
      )}
      <Section
        title={path.length === 0 ? "By name" : `By name, page ${path.length + 1}`}
        actions={
          <TextInput
            placeholder="Search"
            aria-label="Search adapters"
            leftSection={<IconSearch size={16} />}
            maxLength={64}
            value={typed}
            onChange={(event) => {
              setTyped(event.currentTarget.value);
              setPath([]);
            }}
          />
        }
      >
        <Loaded query={adapters} height={400}>
          {(page) =>
            page.data.length === 0 && search ? (
              <Text c="dimmed" size="sm">
                No adapter has “{search}” in its name.
              </Text>
            ) : page.data.length === 0 && path.length === 0 ? (
              <Empty icon={IconStack2} title="No adapter yet" action={can("adapters") && open}>
                An adapter is a fine-tune that PEFT has saved: adapter_config.json and adapter_model.safetensors. Upload
                both files, and call it as {tenant}/name a moment later.
              </Empty>
            ) : (
              <>
                <Listing rows={adaptersOf(page)} />
                <Group justify="space-between" mt="md" display={path.length === 0 && !page.has_more ? "none" : undefined}>
                  <Button variant="default" disabled={path.length === 0} onClick={() => setPath(path.slice(0, -1))}>
                    Previous
                  </Button>
                  <Text size="sm" c="dimmed">
                    {PAGE} on a page
                  </Text>
                  <Button
                    variant="default"
                    disabled={!page.has_more || page.last_id === null}
                    onClick={() => setPath([...path, page.last_id!])}
                  >
                    Next
                  </Button>
                </Group>
              </>
            )
          }
        </Loaded>
      </Section>
      <Pushed />
      <Deleted mayRestore={can("adapters")} />
    </Page>
  );
}

/** Live versions of training adapters; nothing if there is none. */
function Pushed() {
  const { tenant } = useSession();
  const pushed = useQuery({ queryKey: ["adapters", "training", tenant], queryFn: () => unwrap(api.GET("/v1/training_adapters")), refetchInterval: 5_000 });
  const rows = (pushed.data?.data ?? []) as TrainingAdapter[];
  if (rows.length === 0) return null;
  return (
    <Section title="In training" about="Versions that a trainer pushes while it trains. Later pushes replace them; each answer names its version.">
      <DataTable
        label="Training adapters"
        rows={rows}
        keyOf={(one) => one.id}
        columns={[
          { title: "Version", cell: (one) => format.localName(one.id) },
          { title: "Base", cell: (one) => one.base_model },
          { title: "Rank", width: 70, number: true, cell: (one) => format.count(one.rank) },
          { title: "Size", width: 100, number: true, cell: (one) => format.bytes(one.size_bytes) },
          { title: "As PEFT", width: 120, cell: (one) => one.parity && <State value={one.parity} /> },
          { title: "Pushed", width: 140, number: true, cell: (one) => <When at={one.created_at} /> },
        ]}
      />
    </Section>
  );
}

/** Adapters whose deletion can be undone; nothing if there is none. */
function Deleted({ mayRestore }: { mayRestore: boolean }) {
  const { tenant } = useSession();
  const queries = useQueryClient();
  const deleted = useQuery({
    queryKey: ["adapters", "deleted", tenant],
    queryFn: () => unwrap(api.GET("/v1/deleted_adapters", { params: { query: { limit: PAGE } } })),
    refetchInterval: 30_000,
  });
  const rows = deleted.data?.data ?? [];
  if (rows.length === 0) return null;
  async function restore(name: string) {
    await unwrap(api.POST("/v1/adapters/{name}/undelete", { params: { path: { name } } }));
    await queries.invalidateQueries({ queryKey: ["adapters"] });
    report(`${name} is restored`);
  }
  return (
    <Section title="Deleted" about="They come back with their revisions, aliases and grants, until their content is removed.">
      <DataTable
        label="Deleted adapters"
        rows={rows}
        keyOf={(one) => one.name}
        columns={[
          { title: "Name", cell: (one) => format.localName(one.name) },
          { title: "Revisions", width: 90, number: true, cell: (one) => format.count(one.revisions) },
          { title: "Deleted", width: 140, number: true, cell: (one) => <When at={one.deleted_at} /> },
          { title: "Kept until", width: 170, number: true, cell: (one) => format.date(one.undo_until) },
          {
            title: "Action",
            width: 110,
            actions: true,
            cell: (one) =>
              mayRestore && (
                <Button size="xs" variant="default" onClick={() => void restore(format.localName(one.name)).catch(complain)}>
                  Restore
                </Button>
              ),
          },
        ]}
      />
    </Section>
  );
}

function Listing({ rows }: { rows: Adapter[] }) {
  return (
    <DataTable
      label="Adapters"
      rows={rows}
      keyOf={(adapter) => adapter.id}
      columns={[
        {
          title: "Name",
          cell: (adapter) => (
            <Link href={`/adapters/${format.localName(adapter.name)}`} className="row-link">
              {format.localName(adapter.name)}
            </Link>
          ),
        },
        { title: "State", width: 110, cell: (adapter) => <State value={adapter.state} /> },
        { title: "Answers", width: 170, cell: (adapter) => <Answers adapter={adapter} /> },
        { title: "Rank", width: 80, number: true, cell: (adapter) => format.count(adapter.rank) },
        { title: "Size", width: 110, number: true, cell: (adapter) => format.bytes(adapter.size_bytes) },
        { title: "Uploaded", width: 140, number: true, cell: (adapter) => <When at={adapter.created_at} /> },
      ]}
    />
  );
}

/** The revisions behind the default alias: `@3`, or `@3 90%, @4 10%` with a canary. */
function Answers({ adapter }: { adapter: Adapter }) {
  const targets = adapter.aliases.find((alias) => alias.name === "default")?.targets ?? [];
  const whole = targets.reduce((sum, target) => sum + target.weight, 0);
  const text =
    targets.length < 2
      ? `@${adapter.revision}`
      : targets.map((target) => `@${target.revision} ${format.share(target.weight / whole)}`).join(", ");
  return (
    <Text size="sm" className="figure">
      {text}
    </Text>
  );
}
