import { Autocomplete, Button, Select, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus, IconUsers } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type MemberObject } from "../api/client";
import { Actions, complain, Confirm, DataTable, Dialog, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import { useSession } from "../session";

const ROLES = [
  { value: "owner", label: "owner: everything" },
  { value: "admin", label: "admin: everything, but no owners and admins" },
  { value: "developer", label: "developer: adapters, requests, keys, webhooks" },
  { value: "billing", label: "billing: usage, invoices, limits" },
  { value: "viewer", label: "viewer: reads" },
];

/** Projects divide a tenant's keys and costs; members are people that an identity provider knows. */
export default function People() {
  const { can, session, viewing } = useSession();
  const seesMembers = viewing !== null || session.scopes.includes("members");
  return (
    <Page title="Projects and members" about="Projects divide keys, limits and costs. Members are people that your identity provider knows.">
      <Projects mayChange={can("projects")} />
      {seesMembers && <Members mayChange={can("members")} />}
    </Page>
  );
}

function Projects({ mayChange }: { mayChange: boolean }) {
  const queries = useQueryClient();
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const [isMaking, make] = useDisclosure();
  async function create(project: string) {
    await unwrap(api.POST("/v1/projects", { body: { name: project } }));
    await queries.invalidateQueries({ queryKey: ["projects"] });
    report(`The project ${project} is open`);
  }
  return (
    <Section
      title="Projects"
      actions={
        mayChange && (
          <Button size="xs" leftSection={<IconPlus size={14} />} onClick={make.open}>
            New project
          </Button>
        )
      }
    >
      {isMaking && <NewProject create={create} onClose={make.close} />}
      <Loaded query={projects}>
        {(found) => (
          <DataTable
            label="Projects"
            rows={found.data}
            keyOf={(project) => project.id}
            columns={[
              { title: "Name", cell: (project) => <b>{project.name}</b> },
              { title: "State", width: 100, cell: (project) => <State value={project.archived_at ? "archived" : "active"} /> },
              { title: "Since", width: 140, cell: (project) => <When at={project.created_at} /> },
              {
                title: "Action",
                width: 110,
                actions: true,
                cell: (project) =>
                  mayChange &&
                  project.name !== "default" &&
                  (project.archived_at ? (
                    <Button size="xs" variant="default" onClick={() => void create(project.name).catch(complain)}>
                      Restore
                    </Button>
                  ) : (
                    <Confirm
                      label="Archive"
                      title={`Archive ${project.name}?`}
                      act={async () => {
                        await unwrap(api.DELETE("/v1/projects/{name}", { params: { path: { name: project.name } } }));
                        await queries.invalidateQueries({ queryKey: ["projects"] });
                      }}
                    >
                      Its keys are refused until the project is restored.
                    </Confirm>
                  )),
              },
            ]}
          />
        )}
      </Loaded>
    </Section>
  );
}

function NewProject({ create, onClose }: { create: (name: string) => Promise<void>; onClose: () => void }) {
  const [name, setName] = useState("");
  return (
    <Dialog title="New project" submit="Create" disabled={!name.trim()} act={() => create(name.trim())} onClose={onClose}>
      <TextInput label="Name" value={name} onChange={(event) => setName(event.currentTarget.value)} data-autofocus />
    </Dialog>
  );
}

function Members({ mayChange }: { mayChange: boolean }) {
  const members = useQuery({ queryKey: ["members"], queryFn: () => unwrap(api.GET("/v1/members")) });
  const [isAdding, add] = useDisclosure();
  const action = mayChange && (
    <Button size="xs" leftSection={<IconPlus size={14} />} onClick={add.open}>
      Add a member
    </Button>
  );
  return (
    <Section title="Members" actions={action}>
      {isAdding && <AddMember onClose={add.close} />}
      <Loaded query={members}>
        {(found) =>
          found.data.length === 0 ? (
            <Empty icon={IconUsers} title="No members" action={action}>
              If the server trusts your identity provider, its people can sign in here in the role that you give them.
            </Empty>
          ) : (
            <DataTable
              label="Members"
              rows={found.data}
              keyOf={(member) => member.id}
              columns={[
                { title: "Person", cell: (member) => <b>{member.subject}</b> },
                { title: "Identity provider", cell: (member) => member.issuer },
                { title: "Role", width: 100, cell: (member) => <State value={member.role} /> },
                { title: "Since", width: 140, cell: (member) => <When at={member.created_at} /> },
                { title: "Action", width: 220, actions: true, cell: (member) => mayChange && <ChangeMember member={member} /> },
              ]}
            />
          )
        }
      </Loaded>
    </Section>
  );
}

function ChangeMember({ member }: { member: MemberObject }) {
  const queries = useQueryClient();
  const [isChanging, change] = useDisclosure();
  const [role, setRole] = useState(member.role);
  const params = { path: { member_id: member.id } };
  async function save() {
    await unwrap(api.PATCH("/v1/members/{member_id}", { params, body: { role } }));
    await queries.invalidateQueries({ queryKey: ["members"] });
    report(`${member.subject} is ${role} from the next request on`);
  }
  return (
    <Actions>
      <Button size="xs" variant="default" onClick={change.open}>
        Change the role
      </Button>
      {isChanging && (
        <Dialog title={`Role of ${member.subject}`} submit="Change the role" disabled={role === member.role} act={save} onClose={change.close}>
          <Select label="Role" data={ROLES} value={role} onChange={(value) => setRole(value ?? role)} allowDeselect={false} data-autofocus />
        </Dialog>
      )}
      <Confirm
        label="Remove"
        title={`Remove ${member.subject}?`}
        act={async () => {
          await unwrap(api.DELETE("/v1/members/{member_id}", { params }));
          await queries.invalidateQueries({ queryKey: ["members"] });
        }}
      >
        Keys that this person made are revoked too.
      </Confirm>
    </Actions>
  );
}

function AddMember({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const providers = useQuery({ queryKey: ["session", "providers"], queryFn: () => unwrap(api.GET("/console/oidc/providers")), staleTime: Infinity });
  const known = (providers.data?.data ?? []).map((one) => one.issuer);
  const [issuer, setIssuer] = useState<string | null>(null);
  const [subject, setSubject] = useState("");
  const [role, setRole] = useState("viewer");
  const from = issuer ?? known[0] ?? "";
  async function save() {
    await unwrap(api.POST("/v1/members", { body: { issuer: from.trim(), subject: subject.trim(), role } }));
    await queries.invalidateQueries({ queryKey: ["members"] });
    report(`${subject.trim()} is a member`);
  }
  return (
    <Dialog title="Add a member" submit="Add the member" disabled={!from.trim() || !subject.trim()} act={save} onClose={onClose}>
      <TextInput
        label="Person"
        description="As the identity provider names the person, such as an e-mail address or a subject's id"
        value={subject}
        onChange={(event) => setSubject(event.currentTarget.value)}
        data-autofocus
      />
      <Autocomplete label="Identity provider" description="Its address, the iss of its tokens" data={known} value={from} onChange={setIssuer} placeholder="https://login.example.com" />
      <Select label="Role" data={ROLES} value={role} onChange={(value) => setRole(value ?? role)} allowDeselect={false} />
      <Text size="sm" c="dimmed">
        You can give roles below your own.
      </Text>
    </Dialog>
  );
}
