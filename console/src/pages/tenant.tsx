import { Anchor, Button, Group, Select, SimpleGrid, Stack, Switch, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link } from "wouter";
import { allKeys, api, unwrap, type LimitObject, type TenantObject, type TenantPlanObject } from "../api/client";
import { isActive, KeyRows, MakeKey, RevokeKey } from "../components/keys";
import { BudgetForm, Budgets, labelOf, LimitForm, valueOf } from "../components/limits";
import { complain, Confirm, DataTable, Dialog, Figure, Loaded, Page, report, Section } from "../components/ui";
import { Look, Suspend } from "./tenants";

/** Scopes of a tenant's key: an operator gives any of them. */
const SCOPES = ["inference", "adapters", "usage", "keys", "projects", "members", "limits", "billing", "audit", "webhooks", "read", "push"];

/** One tenant, as its operator manages it: tier, keys, price plan, limits and budgets. */
export default function Tenant({ name }: { name: string }) {
  const tenant = useQuery({
    queryKey: ["operator", "tenants", name],
    queryFn: () => unwrap(api.GET("/admin/tenants/{name}", { params: { path: { name } } })),
  });
  return (
    <Page
      title={name}
      about={
        <Anchor component={Link} href="/operator/tenants" size="sm">
          Tenants
        </Anchor>
      }
      actions={
        tenant.data && (
          <>
            <Look tenant={tenant.data} />
            <Suspend tenant={tenant.data} />
          </>
        )
      }
    >
      <Loaded query={tenant} height={200}>
        {(found) => (
          <>
            <SimpleGrid cols={{ base: 2, md: 3 }}>
              <Figure label="State" value={found.suspended_at ? "suspended" : "active"} color={found.suspended_at ? "red" : "teal"} />
              <Figure label="Tier" value={found.tier} />
              <Plan name={name} />
            </SimpleGrid>
            <Service tenant={found} />
            <Keys name={name} />
            <PricePlans name={name} />
            <TenantLimits tenant={found} />
            <TenantBudgets tenant={found} />
          </>
        )}
      </Loaded>
    </Page>
  );
}

const usePlans = (name: string) =>
  useQuery({
    queryKey: ["operator", "tenants", name, "plans"],
    queryFn: () => unwrap(api.GET("/admin/tenants/{tenant}/price-plans", { params: { path: { tenant: name } } })),
  });

const thisMonth = () => new Date().toISOString().slice(0, 7);

/** The plan of this month, of plans by month, oldest first. */
const planNow = (plans: TenantPlanObject[]) => plans.filter((one) => one.month <= thisMonth()).at(-1);

function Plan({ name }: { name: string }) {
  const plan = planNow(usePlans(name).data?.data ?? []);
  return <Figure label="Price plan" value={plan?.plan ?? "none"} note={plan && `in ${plan.currency}, since ${plan.month}`} />;
}

function Service({ tenant }: { tenant: TenantObject }) {
  const queries = useQueryClient();
  const tiers = useQuery({ queryKey: ["operator", "tiers"], queryFn: () => unwrap(api.GET("/admin/tiers")) });
  async function change(body: { tier?: string; zero_retention?: boolean; allow_judges?: boolean }) {
    await unwrap(api.PATCH("/admin/tenants/{name}", { params: { path: { name: tenant.name } }, body }));
    await queries.invalidateQueries({ queryKey: ["operator", "tenants"] });
    report(`${tenant.name} is changed from its next request on`);
  }
  return (
    <Section title="Service">
      <Stack>
        <Select
          label="Tier"
          description="Its class and weight among other tenants, and its limits"
          aria-label={`Tier of ${tenant.name}`}
          maw={320}
          data={(tiers.data?.data ?? [{ name: tenant.tier }]).map((tier) => tier.name)}
          value={tenant.tier}
          onChange={(tier) => tier && void change({ tier }).catch(complain)}
          allowDeselect={false}
        />
        <Switch
          label="Store nothing of what its requests say or get"
          description="Kept answers go at once, files within the hour, and batches are cancelled."
          checked={tenant.zero_retention}
          onChange={(event) => void change({ zero_retention: event.currentTarget.checked }).catch(complain)}
        />
        <Switch
          label="Let its evaluations show prompts and answers to judges"
          description="Judges are services of third parties."
          checked={tenant.allow_judges}
          onChange={(event) => void change({ allow_judges: event.currentTarget.checked }).catch(complain)}
        />
      </Stack>
    </Section>
  );
}

function Keys({ name }: { name: string }) {
  const queries = useQueryClient();
  const [isMaking, make] = useDisclosure();
  const queryKey = ["operator", "tenants", name, "keys"];
  const path = { name };
  const keys = useQuery({ queryKey, queryFn: () => allKeys(name) });
  const changed = () => queries.invalidateQueries({ queryKey });
  return (
    <Section
      title="Keys"
      actions={
        <Button size="xs" leftSection={<IconPlus size={14} />} onClick={make.open}>
          Make a key
        </Button>
      }
    >
      {isMaking && (
        <MakeKey
          title={`Make a key for ${name}`}
          scopes={SCOPES}
          projects={["default"]}
          models={null}
          create={(body) => unwrap(api.POST("/admin/tenants/{name}/keys", { params: { path }, body }))}
          changed={changed}
          onClose={make.close}
        />
      )}
      <Loaded query={keys} height={100}>
        {(found) =>
          found.length === 0 ? (
            <Text size="sm" c="dimmed">
              No key yet: nobody can send requests for this tenant.
            </Text>
          ) : (
            <KeyRows
              rows={[...found].reverse()}
              actions={(key) =>
                isActive(key) && (
                  <RevokeKey apiKey={key} revoke={() => unwrap(api.DELETE("/admin/keys/{key_id}", { params: { path: { key_id: key.id } } }))} changed={changed} />
                )
              }
            />
          )
        }
      </Loaded>
    </Section>
  );
}

function PricePlans({ name }: { name: string }) {
  const queries = useQueryClient();
  const [isAssigning, assign] = useDisclosure();
  const plans = usePlans(name);
  return (
    <Section
      title="Price plan"
      about="A month (UTC) is billed by the plan of its first day. Without a plan nothing is billed, and no budget can be set."
      actions={
        <Button size="xs" leftSection={<IconPlus size={14} />} onClick={assign.open}>
          Assign a plan
        </Button>
      }
    >
      {isAssigning && <Assign name={name} has={plans.data?.data ?? []} onClose={assign.close} />}
      <Loaded query={plans} height={80}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No price plan.
            </Text>
          ) : (
            <DataTable
              label="Price plans"
              rows={[...found.data].reverse()}
              keyOf={(one) => one.month}
              columns={[
                { title: "From", width: 110, cell: (one) => one.month },
                { title: "Plan", cell: (one) => <b>{one.plan}</b> },
                { title: "Currency", width: 100, cell: (one) => one.currency },
                {
                  title: "Action",
                  width: 110,
                  actions: true,
                  cell: (one) =>
                    one.month >= thisMonth() && (
                      <Confirm
                        label="Take back"
                        title={`Take ${one.plan} back?`}
                        act={async () => {
                          const path = { tenant: name, month: one.month };
                          await unwrap(api.DELETE("/admin/tenants/{tenant}/price-plans/{month}", { params: { path } }));
                          await queries.invalidateQueries({ queryKey: ["operator", "tenants", name] });
                          report("The plan is taken back");
                        }}
                      >
                        The plan from before applies from {one.month} on, or none.
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

function Assign({ name, has, onClose }: { name: string; has: TenantPlanObject[]; onClose: () => void }) {
  const queries = useQueryClient();
  const plans = useQuery({ queryKey: ["operator", "price-plans"], queryFn: () => unwrap(api.GET("/admin/price-plans")) });
  const [plan, setPlan] = useState<string | null>(null);
  const [month, setMonth] = useState(thisMonth());
  const replace = has.some((one) => one.month === month);
  async function save() {
    const path = { tenant: name, month };
    await unwrap(api.PUT("/admin/tenants/{tenant}/price-plans/{month}", { params: { path }, body: { plan: plan!, replace } }));
    await queries.invalidateQueries({ queryKey: ["operator", "tenants", name] });
    report(`${name} has the plan ${plan} from ${month} on`);
  }
  const isNone = plans.data?.data.length === 0;
  return (
    <Dialog title={`Price plan of ${name}`} submit={replace ? "Replace the plan" : "Assign the plan"} disabled={!plan || !/^\d{4}-\d\d$/.test(month)} act={save} onClose={onClose}>
      {isNone && <Text size="sm">There is no price plan yet. Plans come from a file, and never change: see “loramux price apply”.</Text>}
      <Select
        label="Plan"
        data={(plans.data?.data ?? []).map((one) => ({ value: one.name, label: `${one.name} (${one.currency}${Number(one.minimum) > 0 ? `, at least ${one.minimum} a month` : ""})` }))}
        value={plan}
        onChange={setPlan}
        data-autofocus
      />
      <TextInput label="From" type="month" description="The first month; it must be open" value={month} onChange={(event) => setMonth(event.currentTarget.value)} />
      {replace && <Text size="sm">This takes the place of the plan that begins in {month}; all usage of the month is billed by the new one.</Text>}
    </Dialog>
  );
}

function TenantLimits({ tenant }: { tenant: TenantObject }) {
  const queries = useQueryClient();
  const [isSetting, set] = useDisclosure();
  const path = { tenant: tenant.name };
  const queryKey = ["operator", "tenants", tenant.name, "limits"];
  const limits = useQuery({ queryKey, queryFn: () => unwrap(api.GET("/admin/tenants/{tenant}/limits", { params: { path } })) });
  async function save(name: string, value: number) {
    await unwrap(api.PUT("/admin/tenants/{tenant}/limits/{name}", { params: { path: { ...path, name } }, body: { value } }));
    await queries.invalidateQueries({ queryKey });
    report("The limit applies from the next request on");
  }
  async function remove({ name }: LimitObject) {
    await unwrap(api.DELETE("/admin/tenants/{tenant}/limits/{name}", { params: { path: { ...path, name } } }));
    await queries.invalidateQueries({ queryKey });
    report("The tier's limit applies again, if it has one");
  }
  return (
    <Section
      title="Limits"
      about={`Its own, and those of the tier ${tenant.tier} for the rest.`}
      actions={
        <Button size="xs" leftSection={<IconPlus size={14} />} onClick={set.open}>
          Set a limit
        </Button>
      }
    >
      {isSetting && <LimitForm title={`Limit of ${tenant.name}`} save={save} onClose={set.close} />}
      <Loaded query={limits} height={80}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No limits.
            </Text>
          ) : (
            <LimitRows rows={found.data} mayRemove={(limit) => limit.subject === tenant.id} remove={remove} />
          )
        }
      </Loaded>
    </Section>
  );
}

interface LimitRowsProperties {
  rows: LimitObject[];
  mayRemove: (limit: LimitObject) => boolean;
  remove: (limit: LimitObject) => Promise<void>;
}

export function LimitRows({ rows, mayRemove, remove }: LimitRowsProperties) {
  return (
    <DataTable
      label="Limits"
      rows={rows}
      keyOf={(limit) => limit.subject + limit.name}
      columns={[
        { title: "Limit", cell: (limit) => labelOf(limit.name) },
        { title: "Value", number: true, cell: valueOf },
        { title: "Of", width: 130, cell: (limit) => (limit.subject.startsWith("tier:") ? "its tier" : "its own") },
        {
          title: "Action",
          width: 110,
          actions: true,
          cell: (limit) =>
            mayRemove(limit) && (
              <Confirm label="Remove" title={`Remove the limit “${labelOf(limit.name)}”?`} act={() => remove(limit)}>
                It applies no longer from the next request on.
              </Confirm>
            ),
        },
      ]}
    />
  );
}

function TenantBudgets({ tenant }: { tenant: TenantObject }) {
  const queries = useQueryClient();
  const [isSetting, set] = useDisclosure();
  const path = { tenant: tenant.name };
  const queryKey = ["operator", "tenants", tenant.name, "budgets"];
  const budgets = useQuery({ queryKey, queryFn: () => unwrap(api.GET("/admin/tenants/{tenant}/budgets", { params: { path } })) });
  const plan = planNow(usePlans(tenant.name).data?.data ?? []);
  async function save(period: string, amount_nano: number) {
    await unwrap(api.PUT("/admin/tenants/{tenant}/budgets/{period}", { params: { path: { ...path, period } }, body: { amount_nano } }));
    await queries.invalidateQueries({ queryKey });
    report("The budget applies from the next request on");
  }
  return (
    <Section
      title="Budgets"
      about="Money of a period, of the whole tenant. At the end of one, requests are refused."
      actions={
        <Button size="xs" leftSection={<IconPlus size={14} />} onClick={set.open}>
          Set a budget
        </Button>
      }
    >
      {isSetting && <BudgetForm title={`Budget of ${tenant.name}`} currency={plan?.currency} save={save} onClose={set.close} />}
      <Loaded query={budgets} height={80}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No budget.
            </Text>
          ) : (
            <Budgets
              rows={found.data}
              nameOf={() => tenant.name}
              actions={(budget) => (
                <Group>
                  <Confirm
                    label="Remove"
                    title="Remove the budget?"
                    act={async () => {
                      await unwrap(api.DELETE("/admin/tenants/{tenant}/budgets/{period}", { params: { path: { ...path, period: budget.period } } }));
                      await queries.invalidateQueries({ queryKey });
                      report("The budget is removed");
                    }}
                  >
                    It no longer bounds what is spent. Invoices do not change.
                  </Confirm>
                </Group>
              )}
            />
          )
        }
      </Loaded>
    </Section>
  );
}
