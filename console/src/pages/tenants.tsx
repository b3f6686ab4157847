import { Button, Group, Modal, Select, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconBuilding, IconEye, IconPlus, IconSearch } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { useLocation } from "wouter";
import { api, unwrap, type TenantObject } from "../api/client";
import { complain, Confirm, DataTable, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const SHOWN = 50;

/** Every tenant with its tier; an operator may look at each one's pages, read-only. */
export default function Tenants() {
  const [isMaking, make] = useDisclosure();
  const [search, setSearch] = useState("");
  const tenants = useQuery({ queryKey: ["operator", "tenants"], queryFn: () => unwrap(api.GET("/admin/tenants")), refetchInterval: 20_000 });
  const action = (
    <Button leftSection={<IconPlus size={16} />} onClick={make.open}>
      New tenant
    </Button>
  );
  return (
    <Page title="Tenants" about="Customers: the boundary of isolation, fairness and billing." actions={action}>
      {isMaking && <Make onClose={make.close} />}
      <Section
        title="All tenants"
        actions={
          <TextInput
            placeholder="Search"
            aria-label="Search tenants"
            leftSection={<IconSearch size={16} />}
            value={search}
            onChange={(event) => setSearch(event.currentTarget.value)}
          />
        }
      >
        <Loaded query={tenants}>
          {(found) => {
            const rows = found.data.filter((tenant) => tenant.name.includes(search.trim().toLowerCase()));
            return rows.length === 0 ? (
              <Empty icon={IconBuilding} title={search ? "No tenant has that name" : "No tenant yet"}>
                A tenant gets a project, and keys that you make for it.
              </Empty>
            ) : (
              <>
                <Listing rows={rows.slice(0, SHOWN)} />
                {rows.length > SHOWN && (
                  <Text size="sm" c="dimmed" mt="sm">
                    {SHOWN} of {format.count(rows.length)}. Search for a name.
                  </Text>
                )}
              </>
            );
          }}
        </Loaded>
      </Section>
    </Page>
  );
}

function Listing({ rows }: { rows: TenantObject[] }) {
  const { view } = useSession();
  const [, navigate] = useLocation();
  const queries = useQueryClient();
  async function change(name: string, body: { tier?: string; suspended?: boolean }) {
    await unwrap(api.PATCH("/admin/tenants/{name}", { params: { path: { name } }, body }));
    await queries.invalidateQueries({ queryKey: ["operator", "tenants"] });
    report(`${name} is changed from its next request on`);
  }
  const tiers = useQuery({ queryKey: ["operator", "tiers"], queryFn: () => unwrap(api.GET("/admin/tiers")) });
  return (
    <DataTable
      label="Tenants"
      rows={rows}
      keyOf={(tenant) => tenant.id}
      minWidth={760}
      columns={[
        { title: "Name", cell: (tenant) => <b>{tenant.name}</b> },
        { title: "State", width: 120, cell: (tenant) => <State value={tenant.suspended_at ? "suspended" : "active"} /> },
        {
          title: "Tier",
          width: 180,
          cell: (tenant) => (
            <Select
              size="xs"
              aria-label={`Tier of ${tenant.name}`}
              data={(tiers.data?.data ?? [{ name: tenant.tier }]).map((tier) => tier.name)}
              value={tenant.tier}
              onChange={(tier) => tier && void change(tenant.name, { tier }).catch(complain)}
              allowDeselect={false}
            />
          ),
        },
        { title: "Since", width: 140, cell: (tenant) => <When at={tenant.created_at} /> },
        {
          title: "Action",
          width: 230,
          number: true,
          cell: (tenant) => (
            <Group gap="xs" justify="flex-end" wrap="nowrap">
              <Button
                size="xs"
                variant="default"
                leftSection={<IconEye size={14} />}
                onClick={() =>
                  void view(tenant.name)
                    .then(() => navigate("/"))
                    .catch(complain)
                }
              >
                Look
              </Button>
              <Confirm
                label={tenant.suspended_at ? "Resume" : "Suspend"}
                title={`${tenant.suspended_at ? "Resume" : "Suspend"} ${tenant.name}?`}
                color={tenant.suspended_at ? "teal" : "red"}
                act={() => change(tenant.name, { suspended: tenant.suspended_at === null })}
              >
                {tenant.suspended_at ? "Its keys work again." : "Every request of it is refused from now on. Nothing is deleted."}
              </Confirm>
            </Group>
          ),
        },
      ]}
    />
  );
}

function Make({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const [name, setName] = useState("");
  async function create() {
    await unwrap(api.POST("/admin/tenants", { body: { name } }));
    await queries.invalidateQueries({ queryKey: ["operator", "tenants"] });
    report(`${name} is there. Make a key for it: loramux key create --tenant ${name}`);
    onClose();
  }
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>New tenant</Text>}>
      <Stack>
        <TextInput label="Name" value={name} onChange={(event) => setName(event.currentTarget.value)} data-autofocus />
        <Group justify="flex-end">
          <Button disabled={!name} onClick={() => void create().catch(complain)}>
            Create
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
