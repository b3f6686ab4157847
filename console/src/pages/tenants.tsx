import { Button, Select, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconBuilding, IconEye, IconPlus, IconSearch } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useLocation } from "wouter";
import { api, unwrap, type TenantObject } from "../api/client";
import { Actions, complain, Confirm, DataTable, Dialog, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const SHOWN = 50;
const DEFAULT_TIER = "standard";

/** Every tenant; an operator manages each on a page of its own, and may look at its pages, read-only. */
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
  return (
    <DataTable
      label="Tenants"
      rows={rows}
      keyOf={(tenant) => tenant.id}
      columns={[
        {
          title: "Name",
          cell: (tenant) => (
            <Link href={`/operator/tenants/${tenant.name}`} className="row-link">
              {tenant.name}
            </Link>
          ),
        },
        { title: "State", width: 110, cell: (tenant) => <State value={tenant.suspended_at ? "suspended" : "active"} /> },
        { title: "Tier", width: 130, cell: (tenant) => tenant.tier },
        { title: "Since", width: 140, cell: (tenant) => <When at={tenant.created_at} /> },
        {
          title: "Action",
          width: 210,
          actions: true,
          cell: (tenant) => (
            <Actions>
              <Look tenant={tenant} />
              <Suspend tenant={tenant} />
            </Actions>
          ),
        },
      ]}
    />
  );
}

/** Show the tenant's own pages, read-only. */
export function Look({ tenant }: { tenant: TenantObject }) {
  const { view } = useSession();
  const [, navigate] = useLocation();
  const look = () => view(tenant.name).then(() => navigate("/"));
  return (
    <Button size="xs" variant="default" leftSection={<IconEye size={14} />} onClick={() => void look().catch(complain)}>
      Look
    </Button>
  );
}

/** Suspend or resume a tenant; nothing for the operator's own, which would lock its operator out. */
export function Suspend({ tenant }: { tenant: TenantObject }) {
  const { session } = useSession();
  const queries = useQueryClient();
  if (tenant.name === session.tenant) return null;
  const isSuspended = tenant.suspended_at !== null;
  return (
    <Confirm
      label={isSuspended ? "Resume" : "Suspend"}
      title={`${isSuspended ? "Resume" : "Suspend"} ${tenant.name}?`}
      color={isSuspended ? "teal" : "red"}
      act={async () => {
        await unwrap(api.PATCH("/admin/tenants/{name}", { params: { path: { name: tenant.name } }, body: { suspended: !isSuspended } }));
        await queries.invalidateQueries({ queryKey: ["operator", "tenants"] });
        report(`${tenant.name} is ${isSuspended ? "served again" : "suspended"}`);
      }}
    >
      {isSuspended ? "Its keys work again." : "Every request of it is refused from now on. Nothing is deleted."}
    </Confirm>
  );
}

function Make({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const [, navigate] = useLocation();
  const tiers = useQuery({ queryKey: ["operator", "tiers"], queryFn: () => unwrap(api.GET("/admin/tiers")) });
  const [name, setName] = useState("");
  const [tier, setTier] = useState(DEFAULT_TIER);
  async function create() {
    const made = await unwrap(api.POST("/admin/tenants", { body: { name: name.trim(), tier } }));
    await queries.invalidateQueries({ queryKey: ["operator", "tenants"] });
    report(`${made.name} is there. Make a key for it`);
    navigate(`/operator/tenants/${made.name}`);
  }
  return (
    <Dialog title="New tenant" submit="Create" disabled={!name.trim()} act={create} onClose={onClose}>
      <TextInput label="Name" description="a-z, 0-9, '.', '_' and '-'" value={name} maxLength={63} onChange={(event) => setName(event.currentTarget.value)} data-autofocus />
      <Select label="Tier" data={(tiers.data?.data ?? [{ name: tier }]).map((one) => one.name)} value={tier} onChange={(value) => setTier(value ?? tier)} allowDeselect={false} />
    </Dialog>
  );
}
