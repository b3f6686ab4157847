import { Button, Select, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconGauge, IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { allKeys, api, unwrap, type BudgetObject } from "../api/client";
import { BudgetForm, Budgets, labelOf, LimitForm, valueOf } from "../components/limits";
import { Confirm, DataTable, Empty, Loaded, Page, report, Section } from "../components/ui";
import { useSession } from "../session";

/** Only a tenant's projects, keys and members have limits that the tenant sets itself. */
const OWN = /^(key|project|member)_/;

/** What a tenant, its projects and its keys may use, and what is left of budgets. */
export default function Limits() {
  const { can, session, viewing } = useSession();
  const [isSetting, set] = useDisclosure();
  const limits = useQuery({ queryKey: ["limits"], queryFn: () => unwrap(api.GET("/v1/limits")), refetchInterval: 30_000 });
  const { nameOf } = useSubjects();
  const action = can("limits") && (
    <Button leftSection={<IconPlus size={16} />} onClick={set.open}>
      Limit a key or project
    </Button>
  );
  return (
    <Page title="Limits" about="Requests beyond a limit get 429 with the time to wait. The operator sets the tenant's own." actions={action}>
      {isSetting && <SetLimit onClose={set.close} />}
      {(viewing !== null || session.scopes.includes("billing")) && <OwnBudgets />}
      <Section title="Limits">
        <Loaded query={limits}>
          {(found) =>
            found.data.length === 0 ? (
              <Empty icon={IconGauge} title="No limits" action={action}>
                Nothing but the server's capacity bounds this tenant. Limits of a key keep one service from using up what
                others need.
              </Empty>
            ) : (
              <DataTable
                label="Limits"
                rows={found.data}
                keyOf={(limit) => limit.subject + limit.name}
                columns={[
                  { title: "Of", cell: (limit) => nameOf(limit.subject) },
                  { title: "Limit", cell: (limit) => labelOf(limit.name) },
                  { title: "Value", number: true, cell: valueOf },
                  {
                    title: "Action",
                    actions: true,
                    cell: (limit) => can("limits") && OWN.test(limit.subject) && <RemoveLimit subject={limit.subject} name={limit.name} />,
                  },
                ]}
              />
            )
          }
        </Loaded>
      </Section>
    </Page>
  );
}

function OwnBudgets() {
  const { can } = useSession();
  const queries = useQueryClient();
  const [isSetting, set] = useDisclosure();
  const budgets = useQuery({ queryKey: ["budgets"], queryFn: () => unwrap(api.GET("/v1/budgets")), refetchInterval: 10_000 });
  const { nameOf } = useSubjects();
  const remove = (budget: BudgetObject) =>
    can("billing") &&
    OWN.test(budget.subject) && (
      <Confirm
        label="Remove"
        title={`Remove the budget of ${nameOf(budget.subject)}?`}
        act={async () => {
          const path = { subject: budget.subject, period: budget.period };
          await unwrap(api.DELETE("/v1/budgets/{subject}/{period}", { params: { path } }));
          await queries.invalidateQueries({ queryKey: ["budgets"] });
          report("The budget is removed");
        }}
      >
        It no longer bounds what is spent. Invoices do not change.
      </Confirm>
    );
  return (
    <Section
      title="Budgets"
      about="Money of a period. At the end of one, requests are refused."
      actions={
        can("billing") && (
          <Button size="xs" leftSection={<IconPlus size={14} />} onClick={set.open}>
            Set a budget
          </Button>
        )
      }
    >
      {isSetting && <SetBudget onClose={set.close} />}
      <Loaded query={budgets} height={120}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No budget. One for a project, a key or a member bounds what it can spend.
            </Text>
          ) : (
            <Budgets rows={found.data} nameOf={nameOf} actions={remove} />
          )
        }
      </Loaded>
    </Section>
  );
}

/** Whatever can have limits of its own: choices for a form, and names by id. */
function useSubjects() {
  const { session, tenant, viewing } = useSession();
  const sees = (scope: string) => viewing !== null || session.scopes.includes(scope);
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => allKeys(), enabled: sees("keys"), retry: false });
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const members = useQuery({ queryKey: ["members"], queryFn: () => unwrap(api.GET("/v1/members")), enabled: sees("members") });
  const names = new Map([
    ...(keys.data ?? []).map((key) => [key.id, `key ${key.name}`] as const),
    ...(projects.data?.data ?? []).map((project) => [project.id, `project ${project.name}`] as const),
    ...(members.data?.data ?? []).map((member) => [member.id, `member ${member.subject}`] as const),
  ]);
  const nameOf = (subject: string) => names.get(subject) ?? (subject.startsWith("tenant_") ? tenant : subject.replace("tier:", "tier "));
  const choices = [
    { group: "Projects", items: (projects.data?.data ?? []).map((one) => ({ value: one.id, label: one.name })) },
    {
      group: "Keys",
      items: (keys.data ?? []).filter((one) => one.revoked_at === null).map((one) => ({ value: one.id, label: `${one.name} …${one.hint}` })),
    },
    { group: "Members", items: (members.data?.data ?? []).map((one) => ({ value: one.id, label: one.subject })) },
  ].filter((group) => group.items.length > 0);
  return { nameOf, choices };
}

function RemoveLimit({ subject, name }: { subject: string; name: string }) {
  const queries = useQueryClient();
  return (
    <Confirm
      label="Remove"
      title="Remove the limit?"
      act={async () => {
        await unwrap(api.DELETE("/v1/limits/{subject}/{name}", { params: { path: { subject, name } } }));
        await queries.invalidateQueries({ queryKey: ["limits"] });
        report("The limit is removed");
      }}
    >
      The tenant's limits still apply.
    </Confirm>
  );
}

function SetLimit({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const { choices } = useSubjects();
  const [subject, setSubject] = useState<string | null>(null);
  async function save(name: string, value: number) {
    await unwrap(api.PUT("/v1/limits/{subject}/{name}", { params: { path: { subject: subject!, name } }, body: { value } }));
    await queries.invalidateQueries({ queryKey: ["limits"] });
    report("The limit applies from the next request on");
  }
  return (
    <LimitForm title="Limit a key or project" everywhere disabled={!subject} save={save} onClose={onClose}>
      <Select label="Of" data={choices} value={subject} onChange={setSubject} searchable data-autofocus />
    </LimitForm>
  );
}

function SetBudget({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const { choices } = useSubjects();
  const [subject, setSubject] = useState<string | null>(null);
  async function save(period: string, amount_nano: number) {
    await unwrap(api.PUT("/v1/budgets/{subject}/{period}", { params: { path: { subject: subject!, period } }, body: { amount_nano } }));
    await queries.invalidateQueries({ queryKey: ["budgets"] });
    report("The budget applies from the next request on");
  }
  return (
    <BudgetForm title="Set a budget" disabled={!subject} save={save} onClose={onClose}>
      <Select label="Of" data={choices} value={subject} onChange={setSubject} searchable data-autofocus />
    </BudgetForm>
  );
}
