// API keys, of a tenant or of any tenant for its operator: the list, and windows that make, rotate and revoke one.
import { Button, Checkbox, Group, MultiSelect, Select, SimpleGrid, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useState, type ReactNode } from "react";
import type { KeyBody, KeyObject } from "../api/client";
import { Confirm, DataTable, Dialog, report, SecretDialog, State, When } from "./ui";

const EXPIRIES = [
  { value: "", label: "Never" },
  { value: "86400", label: "In a day" },
  { value: "2592000", label: "In 30 days" },
  { value: "7776000", label: "In 90 days" },
  { value: "31536000", label: "In a year" },
];
const OVERLAPS = [
  { value: "0", label: "At once" },
  { value: "3600", label: "In an hour" },
  { value: "86400", label: "In a day" },
  { value: "604800", label: "In a week" },
];

function stateOf(key: KeyObject): string {
  if (key.revoked_at) return "revoked";
  return key.expires_at && key.expires_at * 1000 < Date.now() ? "expired" : "active";
}

export const isActive = (key: KeyObject) => stateOf(key) === "active";

export function KeyRows({ rows, actions }: { rows: KeyObject[]; actions: (key: KeyObject) => ReactNode }) {
  return (
    <DataTable
      label="Keys"
      rows={rows}
      keyOf={(key) => key.id}
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
          width: 220,
          cell: (key) => (
            <Text size="sm">
              {key.scopes.join(", ")}
              {key.models && ` · ${key.models.length} ${key.models.length === 1 ? "model" : "models"} only`}
            </Text>
          ),
        },
        { title: "Last used", width: 140, cell: (key) => <When at={key.last_used_at} /> },
        { title: "Ends", width: 140, cell: (key) => <When at={key.revoked_at ?? key.expires_at} /> },
        { title: "Action", width: 200, actions: true, cell: actions },
      ]}
    />
  );
}

export function RevokeKey({ apiKey, revoke, changed }: { apiKey: KeyObject; revoke: () => Promise<unknown>; changed: () => Promise<unknown> }) {
  return (
    <Confirm
      label="Revoke"
      title={`Revoke ${apiKey.name}?`}
      act={async () => {
        await revoke();
        await changed();
        report("The key is revoked");
      }}
    >
      Requests with it are refused from now on, and so are keys that it has made. This cannot be undone.
    </Confirm>
  );
}

interface RotateProperties {
  apiKey: KeyObject;
  rotate: (overlapSeconds: number) => Promise<KeyObject>;
  changed: () => Promise<unknown>;
}

/** A new secret with the same permissions; the old one ends after an overlap. */
export function RotateKey({ apiKey, rotate, changed }: RotateProperties) {
  const [isOpen, window] = useDisclosure();
  const [overlap, setOverlap] = useState("86400");
  const [made, setMade] = useState<KeyObject | null>(null);
  const shown = () => {
    setMade(null);
    void changed();
  };
  return (
    <>
      <Button size="xs" variant="default" onClick={window.open}>
        Rotate
      </Button>
      {isOpen && (
        <Dialog title={`Rotate ${apiKey.name}?`} submit="Rotate the key" act={async () => setMade(await rotate(Number(overlap)))} onClose={window.close}>
          <Text size="sm">A new key gets the same scopes, project, models and limits. Give its secret to the service, then let the old one end.</Text>
          <Select label="The old key ends" data={OVERLAPS} value={overlap} onChange={(value) => setOverlap(value ?? overlap)} allowDeselect={false} />
        </Dialog>
      )}
      {made && <SecretDialog title={`${made.name}: its new secret`} secret={made.key ?? ""} onClose={shown} />}
    </>
  );
}

interface MakeProperties {
  title: string;
  /** Those that the maker may pass on. */
  scopes: string[];
  projects: string[];
  /** Names to choose from as the reader types; null: the key is for all models. */
  models: { names: string[]; search: string; setSearch: (text: string) => void } | null;
  create: (body: KeyBody) => Promise<KeyObject>;
  changed: () => Promise<unknown>;
  onClose: () => void;
}

export function MakeKey({ title, scopes: own, projects, models: listed, create, changed, onClose }: MakeProperties) {
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState(own.filter((scope) => ["inference", "usage"].includes(scope)));
  const [project, setProject] = useState<string | null>(null);
  const [models, setModels] = useState<string[]>([]);
  const [expiry, setExpiry] = useState("7776000");
  const [made, setMade] = useState<KeyObject | null>(null);
  async function make() {
    const expires_in = expiry ? Number(expiry) : null;
    setMade(await create({ name: name.trim(), scopes, project, models: models.length > 0 ? models : null, expires_in }));
    await changed();
  }
  if (made) return <SecretDialog title={made.name} secret={made.key ?? ""} onClose={onClose} />;
  return (
    <Dialog title={title} submit="Make the key" size="lg" disabled={!name.trim() || scopes.length === 0} act={make} onClose={onClose} stays>
      <TextInput
        label="Name"
        description="The service that will use it"
        value={name}
        maxLength={128}
        onChange={(event) => setName(event.currentTarget.value)}
        required
        data-autofocus
      />
      <Checkbox.Group label="Scopes" description="No more than you have yourself" value={scopes} onChange={setScopes}>
        <SimpleGrid cols={{ base: 2, xs: 3 }} mt="xs">
          {own.map((scope) => (
            <Checkbox key={scope} value={scope} label={scope} />
          ))}
        </SimpleGrid>
      </Checkbox.Group>
      <Group grow align="flex-start">
        <Select label="Project" placeholder="default" data={projects} value={project} onChange={setProject} clearable />
        <Select label="Ends" data={EXPIRIES} value={expiry} onChange={(value) => setExpiry(value ?? "")} allowDeselect={false} />
      </Group>
      {listed && (
        <MultiSelect
          label="Models"
          description="Leave it empty for all models of the tenant"
          data={[...new Set([...models, ...listed.names])]}
          value={models}
          onChange={setModels}
          searchValue={listed.search}
          onSearchChange={listed.setSearch}
          limit={50}
          searchable
        />
      )}
    </Dialog>
  );
}
