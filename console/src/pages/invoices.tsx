import { Alert, Badge, Button, Group, Select, SimpleGrid, Stack, Table, Text } from "@mantine/core";
import { IconDownload } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api, headersFor, refusal, unwrap, type PrintedInvoice } from "../api/client";
import { complain, DataTable, Loaded, Page, Section } from "../components/ui";
import { useSession } from "../session";

const MONTHS = 24;
/** ISO 4217's "no currency": a tenant without a price plan. */
const NO_CURRENCY = "XXX";

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
    queryFn: () => unwrap(api.GET("/v1/organization/invoices/{month}/printed", { params: { path: { month } } })) as Promise<PrintedInvoice>,
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

function Shown({ invoice, month }: { invoice: PrintedInvoice; month: string }) {
  return (
    <Section
      title={invoice.title}
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
      <SimpleGrid cols={{ base: 1, sm: 3 }} mb="lg">
        <Party title="From" lines={invoice.seller} />
        <Party title="Bill to" lines={invoice.buyer} />
        <Party title="Dates" lines={invoice.facts.slice(1).map(([name, value]) => `${name}: ${value}`)} />
      </SimpleGrid>
      {invoice.lines.length === 0 ? (
        <Text size="sm" c="dimmed">
          Nothing was used, or the tenant has no price plan in this month.
        </Text>
      ) : (
        <DataTable
          label="Lines"
          rows={invoice.lines.map((line, place) => ({ ...line, place }))}
          keyOf={(line) => `${line.place}`}
          columns={[
            { title: "Description", cell: (line) => line.description },
            { title: "Quantity", number: true, width: 140, cell: (line) => line.quantity },
            { title: `Price (${invoice.currency})`, width: 200, cell: (line) => line.prices.map((price) => <div key={price}>{price}</div>) },
            { title: `Amount (${invoice.currency})`, number: true, width: 120, cell: (line) => line.amount },
          ]}
        />
      )}
      <Stack align="flex-end" mt="md">
        <Table w={340} maw="100%" withRowBorders={false} verticalSpacing={4} aria-label="Sum">
          <Table.Tbody>
            {invoice.totals.map(([name, amount], place) => (
              <Sum key={name} name={name} value={`${amount} ${invoice.currency.replace(NO_CURRENCY, "")}`} isBold={place === invoice.totals.length - 1} />
            ))}
          </Table.Tbody>
        </Table>
      </Stack>
      {invoice.notes.map((note) => (
        <Text key={note} size="sm" mt="sm">
          {note}
        </Text>
      ))}
      <Text size="xs" c="dimmed" mt="md" className="long">
        {invoice.proof}
      </Text>
    </Section>
  );
}

function Party({ title, lines }: { title: string; lines: string[] }) {
  return (
    <div>
      <Text size="xs" c="dimmed" fw={600}>
        {title}
      </Text>
      {lines.map((line) => (
        <Text key={line} size="sm" className="long">
          {line}
        </Text>
      ))}
    </div>
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
