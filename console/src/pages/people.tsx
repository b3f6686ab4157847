import { Button, Group, Modal, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus, IconUsers } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap } from "../api/client";
import { complain, Confirm, DataTable, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import { useSession } from "../session";

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
  const [name, setName] = useState("");
  async function create(project: string) {
    await unwrap(api.POST("/v1/projects", { body: { name: project } }));
    await queries.invalidateQueries({ queryKey: ["projects"] });
    report(`The project ${project} is open`);
    make.close();
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
      <Modal opened={isMaking} onClose={make.close} title={<Text fw={600}>New project</Text>}>
        <Stack>
          <TextInput label="Name" value={name} onChange={(event) => setName(event.currentTarget.value)} data-autofocus />
          <Group justify="flex-end">
            <Button disabled={!name} onClick={() => void create(name).catch(complain)}>
              Create
            </Button>
          </Group>
        </Stack>
      </Modal>
      <Loaded query={projects}>
        {(found) => (
          <DataTable
            label="Projects"
            rows={found.data}
            keyOf={(project) => project.id}
            columns={[
              { title: "Name", cell: (project) => <b>{project.name}</b> },
              { title: "State", cell: (project) => <State value={project.archived_at ? "archived" : "active"} /> },
              { title: "Since", cell: (project) => <When at={project.created_at} /> },
              {
                title: "Action",
                number: true,
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

function Members({ mayChange }: { mayChange: boolean }) {
  const queries = useQueryClient();
  const members = useQuery({ queryKey: ["members"], queryFn: () => unwrap(api.GET("/v1/members")) });
  return (
    <Section title="Members">
      <Loaded query={members}>
        {(found) =>
          found.data.length === 0 ? (
            <Empty icon={IconUsers} title="No members">
              Where the server trusts an identity provider, add people with "loramux member add" or POST /v1/members.
            </Empty>
          ) : (
            <DataTable
              label="Members"
              rows={found.data}
              keyOf={(member) => member.id}
              columns={[
                { title: "Person", cell: (member) => <b>{member.subject}</b> },
                { title: "Identity provider", cell: (member) => member.issuer },
                { title: "Role", cell: (member) => <State value={member.role} /> },
                { title: "Since", cell: (member) => <When at={member.created_at} /> },
                {
                  title: "Action",
                  number: true,
                  cell: (member) =>
                    mayChange && (
                      <Confirm
                        label="Remove"
                        title={`Remove ${member.subject}?`}
                        act={async () => {
                          await unwrap(api.DELETE("/v1/members/{member_id}", { params: { path: { member_id: member.id } } }));
                          await queries.invalidateQueries({ queryKey: ["members"] });
                        }}
                      >
                        Keys that this person made are revoked too.
                      </Confirm>
                    ),
                },
              ]}
            />
          )
        }
      </Loaded>
    </Section>
  );
}
