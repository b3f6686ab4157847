import { Button, Group, Modal, NumberInput, Progress, Select, Stack, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconGauge, IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type BudgetObject } from "../api/client";
import { complain, Confirm, DataTable, Empty, Loaded, Page, report, Section } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const NANO = 1e9;
const NAMES = ["requests_per_minute", "tokens_per_minute", "concurrent_requests", "queued_requests"];

/** What a tenant, its projects and its keys may use, and what is left of budgets. */
export default function Limits() {
  const { can, session, viewing } = useSession();
  const [isSetting, set] = useDisclosure();
  const limits = useQuery({ queryKey: ["limits"], queryFn: () => unwrap(api.GET("/v1/limits")), refetchInterval: 30_000 });
  const seesBudgets = viewing !== null || session.scopes.includes("billing");
  const budgets = useQuery({
    queryKey: ["budgets"],
    queryFn: () => unwrap(api.GET("/v1/budgets")),
    enabled: seesBudgets,
    refetchInterval: 10_000,
  });
  const nameOf = useSubjects();
  const action = can("limits") && (
    <Button leftSection={<IconPlus size={16} />} onClick={set.open}>
      Limit a key or project
    </Button>
  );
  return (
    <Page title="Limits" about="Requests beyond a limit get 429 with the time to wait. The operator sets the tenant's own." actions={action}>
      {isSetting && <SetLimit onClose={set.close} />}
      {seesBudgets && (
        <Section title="Budgets" about="Money of a period. At the end of one, requests are refused.">
          <Loaded query={budgets} height={120}>
            {(found) =>
              found.data.length === 0 ? (
                <Text size="sm" c="dimmed">
                  No budget. Set one for a key or a project with <code>PUT /v1/budgets/SUBJECT/month</code>; it needs a price plan.
                </Text>
              ) : (
                <Stack gap="lg">
                  {found.data.map((budget) => (
                    <Budget key={budget.id} budget={budget} name={nameOf(budget.subject)} />
                  ))}
                </Stack>
              )
            }
          </Loaded>
        </Section>
      )}
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
                  { title: "Limit", cell: (limit) => limit.name.replaceAll("_", " ") },
                  { title: "Value", number: true, cell: (limit) => format.count(limit.value) },
                  {
                    title: "Action",
                    number: true,
                    cell: (limit) => can("limits") && /^(key|project|member)_/.test(limit.subject) && <Remove subject={limit.subject} name={limit.name} />,
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

function Budget({ budget, name }: { budget: BudgetObject; name: string }) {
  const used = (budget.spent_nano ?? 0) + (budget.held_nano ?? 0);
  const part = budget.amount_nano > 0 ? used / budget.amount_nano : 1;
  const color = part >= 1 ? "red" : part >= 0.8 ? "orange" : "teal";
  const show = (nano: number) => format.money(nano / NANO, budget.currency);
  return (
    <div>
      <Group justify="space-between" mb={6}>
        <Text fw={550} className="long">
          {name} <Text span c="dimmed" size="sm">{budget.period === "total" ? "in total" : `this ${budget.period}`}</Text>
        </Text>
        <Text size="sm" className="figure">
          {show(budget.amount_nano - used)} left of {show(budget.amount_nano)}
        </Text>
      </Group>
      <Progress value={Math.min(100, part * 100)} color={color} aria-label={`${name}: ${format.share(part)} used`} />
    </div>
  );
}

function useSubjects() {
  const { session, tenant, viewing } = useSession();
  const sees = viewing !== null || session.scopes.includes("keys");
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => unwrap(api.GET("/v1/keys")), enabled: sees });
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const names = new Map([
    ...(keys.data?.data ?? []).map((key) => [key.id, `key ${key.name}`] as const),
    ...(projects.data?.data ?? []).map((project) => [project.id, `project ${project.name}`] as const),
  ]);
  return (subject: string) => names.get(subject) ?? (subject.startsWith("tenant_") ? tenant : subject.replace("tier:", "tier "));
}

function Remove({ subject, name }: { subject: string; name: string }) {
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
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => unwrap(api.GET("/v1/keys")), retry: false });
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const [subject, setSubject] = useState<string | null>(null);
  const [name, setName] = useState(NAMES[0]!);
  const [value, setValue] = useState<number | string>("");
  const data = [
    { group: "Projects", items: (projects.data?.data ?? []).map((one) => ({ value: one.id, label: one.name })) },
    {
      group: "Keys",
      items: (keys.data?.data ?? []).filter((one) => one.revoked_at === null).map((one) => ({ value: one.id, label: `${one.name} …${one.hint}` })),
    },
  ];
  async function save() {
    const path = { subject: subject!, name };
    await unwrap(api.PUT("/v1/limits/{subject}/{name}", { params: { path }, body: { value: Number(value) } }));
    await queries.invalidateQueries({ queryKey: ["limits"] });
    report("The limit applies from the next request on");
    onClose();
  }
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>Limit a key or project</Text>}>
      <Stack>
        <Select label="Of" data={data} value={subject} onChange={setSubject} searchable />
        <Select label="Limit" data={NAMES.map((one) => ({ value: one, label: one.replaceAll("_", " ") }))} value={name} onChange={(chosen) => setName(chosen ?? name)} allowDeselect={false} />
        <NumberInput label="Value" min={0} allowDecimal={false} value={value} onChange={setValue} thousandSeparator />
        <Group justify="flex-end">
          <Button variant="default" onClick={onClose}>
            Cancel
          </Button>
          <Button disabled={!subject || value === ""} onClick={() => void save().catch(complain)}>
            Set the limit
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
