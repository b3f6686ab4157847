// Limits and budgets, of a tenant, a tier, a project, a key or a member: what there is, and the forms that set one.
import { NumberInput, Progress, Select, Stack, Text, Group } from "@mantine/core";
import { useState, type ReactNode } from "react";
import type { BudgetObject } from "../api/client";
import * as format from "../format";
import { Dialog } from "./ui";

const NANO = 1e9;

interface Definition {
  label: string;
  unit: string;
  /** Also for a project, a key or a member; the others are for a tenant or a tier. */
  everywhere: boolean;
}

/** The limits that the server knows, by name, with their units. */
export const LIMITS: Record<string, Definition> = {
  requests_per_minute: { label: "Requests", unit: "a minute", everywhere: true },
  tokens_per_minute: { label: "Prompt and answer tokens", unit: "a minute", everywhere: true },
  concurrent_requests: { label: "Requests at the same time", unit: "requests", everywhere: true },
  queued_requests: { label: "Requests that wait for their first token", unit: "requests", everywhere: false },
  batch_requests_per_minute: { label: "Lines of batches", unit: "a minute", everywhere: true },
  batch_tokens_per_minute: { label: "Tokens of batches", unit: "a minute", everywhere: true },
  batch_concurrent_requests: { label: "Lines of batches at the same time", unit: "lines", everywhere: true },
  file_bytes: { label: "All files together", unit: "bytes", everywhere: false },
  adapters: { label: "Adapters", unit: "adapters", everywhere: false },
  adapter_bytes: { label: "All adapters together", unit: "bytes", everywhere: false },
  adapter_rank: { label: "Largest rank of an adapter", unit: "", everywhere: false },
  adapter_file_bytes: { label: "Weights of one adapter", unit: "bytes", everywhere: false },
  adapter_modules: { label: "Modules that one adapter changes", unit: "modules", everywhere: false },
};

export const labelOf = (name: string) => LIMITS[name]?.label ?? name.replaceAll("_", " ");

/** A limit's value with its unit. */
export function valueOf({ name, value }: { name: string; value: number }): string {
  const unit = LIMITS[name]?.unit ?? "";
  return unit === "bytes" ? format.bytes(value) : `${format.count(value)} ${unit}`.trim();
}

interface LimitFormProperties {
  title: string;
  /** Only the limits that a project, a key or a member can have. */
  everywhere?: boolean;
  /** A field before the limit's own, such as whose it is. */
  children?: ReactNode;
  disabled?: boolean;
  save: (name: string, value: number) => Promise<unknown>;
  onClose: () => void;
}

export function LimitForm({ title, everywhere = false, children, disabled = false, save, onClose }: LimitFormProperties) {
  const names = Object.keys(LIMITS).filter((name) => !everywhere || LIMITS[name]!.everywhere);
  const [name, setName] = useState(names[0]!);
  const [value, setValue] = useState<number | string>("");
  return (
    <Dialog title={title} submit="Set the limit" disabled={disabled || value === ""} act={() => save(name, Number(value))} onClose={onClose}>
      {children}
      <Select
        label="Limit"
        data={names.map((one) => ({ value: one, label: LIMITS[one]!.label }))}
        value={name}
        onChange={(chosen) => setName(chosen ?? name)}
        allowDeselect={false}
      />
      <NumberInput
        label="Value"
        description={LIMITS[name]!.unit === "bytes" ? "bytes" : `${LIMITS[name]!.label}: ${LIMITS[name]!.unit || "a number"}`}
        min={0}
        allowDecimal={false}
        value={value}
        onChange={setValue}
        thousandSeparator
      />
    </Dialog>
  );
}

const PERIODS = [
  { value: "day", label: "a day (UTC)" },
  { value: "month", label: "a month (UTC)" },
  { value: "total", label: "in total" },
] as const;
export type Period = (typeof PERIODS)[number]["value"];

interface BudgetFormProperties {
  title: string;
  currency?: string | null;
  children?: ReactNode;
  disabled?: boolean;
  save: (period: Period, amountNano: number) => Promise<unknown>;
  onClose: () => void;
}

export function BudgetForm({ title, currency, children, disabled = false, save, onClose }: BudgetFormProperties) {
  const [period, setPeriod] = useState<Period>("month");
  const [amount, setAmount] = useState<number | string>("");
  return (
    <Dialog
      title={title}
      submit="Set the budget"
      disabled={disabled || amount === ""}
      act={() => save(period, Math.round(Number(amount) * NANO))}
      onClose={onClose}
    >
      {children}
      <NumberInput
        label="Amount"
        description={currency ? `in ${currency}` : "in the currency of the price plan"}
        min={0}
        decimalScale={9}
        thousandSeparator
        value={amount}
        onChange={setAmount}
      />
      <Select label="For" data={[...PERIODS]} value={period} onChange={(chosen) => setPeriod((chosen as Period | null) ?? period)} allowDeselect={false} />
      <Text size="sm" c="dimmed">
        A budget needs a price plan. Requests are refused once it is spent; alerts go out at 50, 80 and 100 %.
      </Text>
    </Dialog>
  );
}

/** Budgets with what is left of them; `actions` are the buttons of each. */
export function Budgets({ rows, nameOf, actions }: { rows: BudgetObject[]; nameOf: (subject: string) => string; actions: (budget: BudgetObject) => ReactNode }) {
  return (
    <Stack gap="lg">
      {rows.map((budget) => (
        <Budget key={budget.id} budget={budget} name={nameOf(budget.subject)} actions={actions(budget)} />
      ))}
    </Stack>
  );
}

function Budget({ budget, name, actions }: { budget: BudgetObject; name: string; actions: ReactNode }) {
  const used = (budget.spent_nano ?? 0) + (budget.held_nano ?? 0);
  const part = budget.amount_nano > 0 ? used / budget.amount_nano : 1;
  const color = part >= 1 ? "red" : part >= 0.8 ? "orange" : "teal";
  const show = (nano: number) => format.money(nano / NANO, budget.currency);
  const period = budget.period === "total" ? "in total" : budget.period === "day" ? "today" : `this ${budget.period}`;
  return (
    <div>
      <Group justify="space-between" mb={6}>
        <Text fw={550} className="long">
          {name}{" "}
          <Text span c="dimmed" size="sm">
            {period}
          </Text>
        </Text>
        <Group gap="sm">
          <Text size="sm" className="figure">
            {show(budget.amount_nano - used)} left of {show(budget.amount_nano)}
          </Text>
          {actions}
        </Group>
      </Group>
      <Progress value={Math.min(100, part * 100)} color={color} aria-label={`${name}: ${format.share(part)} used`} />
    </div>
  );
}
