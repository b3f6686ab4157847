import { Alert, Badge, Button, Group, Select, Stack, Table, Text } from "@mantine/core";
import { IconDownload } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { headersFor, read, refusal } from "../api/client";
import { complain, DataTable, Loaded, Page, Section } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

interface Line {
  description?: string;
  meter: string;
  base_model: string;
  tier: string;
  quantity: number;
  unit_price?: string;
  amount: string;
}

interface Invoice {
  id: string;
  status: "draft" | "final";
  period: string;
  period_start: number;
  period_end: number;
  currency: string;
  lines: Line[];
  subtotal: string | null;
  tax_amount: string | null;
  total: string;
}

const MONTHS = 24;

/** The last two years' months, newest first, as the API names them. */
function months(): { value: string; label: string }[] {
  const now = new Date();
  return Array.from({ length: MONTHS }, (_, back) => {
    const first = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1));
    const label = first.toLocaleDateString(undefined, { month: "long", year: "numeric", timeZone: "UTC" });
    return { value: first.toISOString().slice(0, 7), label: back === 0 ? `${label} (open)` : label };
  });
}

export default function Invoices() {
  const { tenant } = useSession();
  const [month, setMonth] = useState(months()[0]!.value);
  const invoice = useQuery({
    queryKey: ["invoice", tenant, month],
    queryFn: () => read<Invoice>(`/v1/organization/invoices/${month}`),
    retry: false,
  });
  const chooser = (
    <Select data={months()} value={month} onChange={(value) => setMonth(value ?? month)} aria-label="Month" allowDeselect={false} />
  );
  return (
    <Page title="Invoices" about="A month (UTC) is closed once. Until then its invoice is a draft that changes with every request." actions={chooser}>
      {invoice.error ? (
        <Alert color="gray" title="There is no invoice for this month">
          {invoice.error.message}
        </Alert>
      ) : (
        <Loaded query={invoice} height={320}>
          {(found) => <Shown invoice={found} month={month} />}
        </Loaded>
      )}
    </Page>
  );
}

function Shown({ invoice, month }: { invoice: Invoice; month: string }) {
  const amount = (text: string) => format.money(Number(text), invoice.currency);
  return (
    <Section
      title={invoice.id}
      about={
        <Badge color={invoice.status === "final" ? "teal" : "yellow"} mt={4}>
          {invoice.status}
        </Badge>
      }
      actions={
        <Group gap="xs">
          {(["pdf", "json"] as const).map((kind) => (
            <Button key={kind} size="xs" variant="default" leftSection={<IconDownload size={14} />} onClick={() => void download(month, kind, invoice.id).catch(complain)}>
              {kind.toUpperCase()}
            </Button>
          ))}
        </Group>
      }
    >
      {invoice.lines.length === 0 ? (
        <Text size="sm" c="dimmed">
          Nothing was used, or the tenant has no price plan in this month.
        </Text>
      ) : (
        <DataTable
          label="Lines"
          rows={invoice.lines}
          keyOf={(line) => `${line.meter} ${line.base_model} ${line.tier} ${line.amount} ${line.quantity}`}
          columns={[
            { title: "What", cell: (line) => line.meter.replaceAll("_", " ") },
            { title: "Model", cell: (line) => line.base_model },
            { title: "Tier", cell: (line) => line.tier },
            { title: "Quantity", number: true, cell: (line) => format.count(Number(line.quantity)) },
            { title: "Amount", number: true, cell: (line) => amount(line.amount) },
          ]}
        />
      )}
      <Stack align="flex-end" mt="md">
        <Table w={300} withRowBorders={false} verticalSpacing={4} aria-label="Sum">
          <Table.Tbody>
            {invoice.subtotal !== null && <Sum name="Without tax" value={amount(invoice.subtotal)} />}
            {invoice.tax_amount !== null && <Sum name="Tax" value={amount(invoice.tax_amount)} />}
            <Sum name="Total" value={amount(invoice.total)} isBold />
          </Table.Tbody>
        </Table>
      </Stack>
    </Section>
  );
}

function Sum({ name, value, isBold = false }: { name: string; value: string; isBold?: boolean }) {
  return (
    <Table.Tr fw={isBold ? 650 : undefined}>
      <Table.Td>{name}</Table.Td>
      <Table.Td ta="right" className="figure">
        {value}
      </Table.Td>
    </Table.Tr>
  );
}

async function download(month: string, kind: "pdf" | "json", id: string) {
  const response = await fetch(`/v1/organization/invoices/${month}?format=${kind}`, { headers: headersFor("GET") });
  if (!response.ok) throw refusal(await response.json().catch(() => null), response.status);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = `${id}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
