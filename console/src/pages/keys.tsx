import { Alert, Button, Checkbox, Code, Group, Modal, MultiSelect, Select, SimpleGrid, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconKey, IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type KeyObject } from "../api/client";
import { Confirm, Copy, DataTable, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import { useModelNames, useSession } from "../session";

const EXPIRIES = [
  { value: "", label: "Never" },
  { value: "86400", label: "In a day" },
  { value: "2592000", label: "In 30 days" },
  { value: "7776000", label: "In 90 days" },
  { value: "31536000", label: "In a year" },
];

export default function Keys() {
  const { can } = useSession();
  const [isMaking, make] = useDisclosure();
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => unwrap(api.GET("/v1/keys")), refetchInterval: 20_000 });
  const action = can("keys") && (
    <Button leftSection={<IconPlus size={16} />} onClick={make.open}>
      Make a key
    </Button>
  );
  return (
    <Page title="Keys" about="A key has scopes, a project and perhaps a list of models. Its secret is shown once." actions={action}>
      {isMaking && <Make onClose={make.close} />}
      <Section title="All keys">
        <Loaded query={keys}>
          {(found) =>
            found.data.length === 0 ? (
              <Empty icon={IconKey} title="No key yet" action={action}>
                Make one for each service that calls this server, with no more scopes than it needs.
              </Empty>
            ) : (
              <Listing rows={[...found.data].reverse()} />
            )
          }
        </Loaded>
      </Section>
    </Page>
  );
}

function stateOf(key: KeyObject): string {
  if (key.revoked_at) return "revoked";
  return key.expires_at && key.expires_at * 1000 < Date.now() ? "expired" : "active";
}

function Listing({ rows }: { rows: KeyObject[] }) {
  const { can } = useSession();
  const queries = useQueryClient();
  return (
    <DataTable
      label="Keys"
      rows={rows}
      keyOf={(key) => key.id}
      minWidth={860}
      columns={[
        {
          title: "Name",
          cell: (key) => (
            <>
              <Text fw={550} className="long">
                {key.name}
              </Text>
              <Text size="xs" c="dimmed" ff="monospace">
                …{key.hint}
              </Text>
            </>
          ),
        },
        { title: "State", width: 100, cell: (key) => <State value={stateOf(key)} /> },
        {
          title: "May",
          cell: (key) => (
            <Text size="sm">
              {key.scopes.join(", ")}
              {key.models && ` · ${key.models.length} models only`}
            </Text>
          ),
        },
        { title: "Last used", width: 130, cell: (key) => <When at={key.last_used_at} /> },
        { title: "Ends", width: 130, cell: (key) => <When at={key.revoked_at ?? key.expires_at} /> },
        {
          title: "Action",
          width: 110,
          number: true,
          cell: (key) =>
            can("keys") &&
            stateOf(key) === "active" && (
              <Confirm
                label="Revoke"
                title={`Revoke ${key.name}?`}
                act={async () => {
                  await unwrap(api.DELETE("/v1/keys/{key_id}", { params: { path: { key_id: key.id } } }));
                  await queries.invalidateQueries({ queryKey: ["keys"] });
                  report("The key is revoked");
                }}
              >
                Requests with it are refused from now on, and so are keys that it has made. This cannot be undone.
              </Confirm>
            ),
        },
      ]}
    />
  );
}

function Make({ onClose }: { onClose: () => void }) {
  const { session } = useSession();
  const queries = useQueryClient();
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const own = session.scopes.filter((scope) => scope !== "operator");
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState(own.filter((scope) => ["inference", "usage"].includes(scope)));
  const [project, setProject] = useState<string | null>(null);
  const [models, setModels] = useState<string[]>([]);
  const [expiry, setExpiry] = useState("7776000");
  const [made, setMade] = useState<KeyObject | null>(null);
  const [refused, setRefused] = useState<string | null>(null);
  const [search, setSearch] = useState("");
  const names = useModelNames(search);

  async function create() {
    try {
      const body = {
        name,
        scopes,
        project,
        models: models.length > 0 ? models : null,
        expires_in: expiry ? Number(expiry) : null,
      };
      setMade(await unwrap(api.POST("/v1/keys", { body })));
      await queries.invalidateQueries({ queryKey: ["keys"] });
    } catch (error) {
      setRefused((error as Error).message);
    }
  }

  if (made) {
    return (
      <Modal opened onClose={onClose} title={<Text fw={600}>{made.name}</Text>} closeOnClickOutside={false}>
        <Stack>
          <Alert color="yellow" title="Copy the secret now">
            It is not stored and cannot be shown again.
          </Alert>
          <Group wrap="nowrap" gap="xs">
            <Code block className="long" flex={1} data-testid="secret">
              {made.key}
            </Code>
            <Copy value={made.key ?? ""} label="Copy the secret" />
          </Group>
          <Group justify="flex-end">
            <Button onClick={onClose}>I have copied it</Button>
          </Group>
        </Stack>
      </Modal>
    );
  }
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>Make a key</Text>} size="lg">
      <Stack>
        {refused && (
          <Alert color="red" role="alert">
            {refused}
          </Alert>
        )}
        <TextInput label="Name" description="The service that will use it" value={name} maxLength={128} onChange={(event) => setName(event.currentTarget.value)} required data-autofocus />
        <Checkbox.Group label="Scopes" description="No more than you have yourself" value={scopes} onChange={setScopes}>
          <SimpleGrid cols={3} mt="xs">
            {own.map((scope) => (
              <Checkbox key={scope} value={scope} label={scope} />
            ))}
          </SimpleGrid>
        </Checkbox.Group>
        <Group grow align="flex-start">
          <Select
            label="Project"
            placeholder="default"
            data={(projects.data?.data ?? []).filter((one) => one.archived_at === null).map((one) => one.name)}
            value={project}
            onChange={setProject}
            clearable
          />
          <Select label="Ends" data={EXPIRIES} value={expiry} onChange={(value) => setExpiry(value ?? "")} allowDeselect={false} />
        </Group>
        <MultiSelect
          label="Models"
          description="Leave it empty for all models of the tenant"
          data={[...new Set([...models, ...names])]}
          value={models}
          onChange={setModels}
          searchValue={search}
          onSearchChange={setSearch}
          limit={50}
          searchable
        />
        <Group justify="flex-end">
          <Button variant="default" onClick={onClose}>
            Cancel
          </Button>
          <Button disabled={!name.trim() || scopes.length === 0} onClick={() => void create()}>
            Make the key
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
