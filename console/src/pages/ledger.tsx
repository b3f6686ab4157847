import { Alert, Button, Code, Group, SimpleGrid, Stack, Text } from "@mantine/core";
import { IconPlugConnected } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type LedgerObject } from "../api/client";
import { complain, Copy, DataTable, Empty, Figure, Loaded, Page, report, Section, When } from "../components/ui";
import * as format from "../format";

/** The proof that the bill is what ran: the chain's head, its anchor, a reconciliation, the sinks. */
export default function Ledger() {
  const queries = useQueryClient();
  const [isBusy, setBusy] = useState(false);
  const ledger = useQuery({ queryKey: ["operator", "ledger"], queryFn: () => unwrap(api.GET("/admin/ledger")), refetchInterval: 10_000 });
  async function reconcile() {
    setBusy(true);
    try {
      const found = await unwrap(api.POST("/admin/ledger/reconcile"));
      report(found.problems.length === 0 ? `${format.count(found.entries)} entries verified` : "The ledger does not agree");
      await queries.invalidateQueries({ queryKey: ["operator", "ledger"] });
    } finally {
      setBusy(false);
    }
  }
  return (
    <Page
      title="Ledger and sinks"
      about="Each entry of the ledger carries the hash of the one before it; checkpoints anchor the chain outside the database."
      actions={
        <Button loading={isBusy} onClick={() => void reconcile().catch(complain)}>
          Reconcile now
        </Button>
      }
    >
      <Loaded query={ledger} height={400}>
        {(found) => (
          <>
            <Proof ledger={found} />
            <Sinks ledger={found} />
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Proof({ ledger }: { ledger: LedgerObject }) {
  const last = ledger.reconciliation;
  const anchor = ledger.checkpoint;
  return (
    <>
      <SimpleGrid cols={{ base: 2, md: 4 }}>
        <Figure label="Entries" value={format.count(ledger.sequence)} note="in the chain" />
        <Figure label="Anchored to" value={anchor ? format.count(anchor.sequence) : "–"} note={anchor ? <When at={anchor.created_at} /> : "no checkpoint yet"} />
        <Figure
          label="Drift"
          value={last ? format.count(last.drift_tokens) : "–"}
          unit={last ? "tokens" : undefined}
          color={last && last.drift_tokens !== 0 ? "red" : undefined}
          note="engines' counts less the ledger's"
        />
        <Figure label="Last reconciled" value={last ? (last.problems.length === 0 ? "agrees" : "altered") : "–"} color={last?.problems.length ? "red" : last ? "teal" : undefined} note={last ? <When at={last.at} /> : "not since this server's start"} />
      </SimpleGrid>
      {last && last.problems.length > 0 && (
        <Alert color="red" role="alert" title="The ledger does not agree">
          <Stack gap={4}>
            {last.problems.slice(0, 20).map((problem) => (
              <Text key={problem} size="sm" className="long">
                {problem}
              </Text>
            ))}
          </Stack>
        </Alert>
      )}
      <Section title="Head of the chain" about="Keep it outside: a ledger that was rewritten has another one.">
        <Group gap="xs" wrap="nowrap">
          <Code className="long">{ledger.hash}</Code>
          <Copy value={ledger.hash} label="Copy the hash" />
        </Group>
      </Section>
    </>
  );
}

function Sinks({ ledger }: { ledger: LedgerObject }) {
  return (
    <Section title="Sinks" about="Outside services that receive usage. Parked entries wait for your decision.">
      {ledger.sinks.length === 0 ? (
        <Empty icon={IconPlugConnected} title="No sink">
          Usage can go to OpenMeter, Stripe, Lago or a webhook of yours: add [[sinks]] to the settings.
        </Empty>
      ) : (
        <DataTable
          label="Sinks"
          rows={ledger.sinks}
          keyOf={(sink) => sink.name}
          columns={[
            { title: "Sink", cell: (sink) => <b>{sink.name}</b> },
            { title: "Delivered up to", number: true, cell: (sink) => format.count(sink.delivered_to) },
            { title: "Behind", number: true, cell: (sink) => `${format.count(sink.behind)} entries` },
            { title: "Under way since", number: true, cell: (sink) => <When at={sink.trying_since} /> },
            { title: "Parked", number: true, cell: (sink) => format.count(sink.parked) },
          ]}
        />
      )}
      {ledger.parked.length > 0 && (
        <DataTable
          label="Parked entries"
          rows={ledger.parked}
          keyOf={(one) => `${one.sink} ${one.event_id}`}
          columns={[
            { title: "Entry", width: 90, number: true, cell: (one) => format.count(one.sequence) },
            { title: "Sink", cell: (one) => one.sink },
            { title: "Event", cell: (one) => <Text size="xs" ff="monospace">{one.event_id}</Text> },
            { title: "Why", cell: (one) => one.reason },
            { title: "When", number: true, cell: (one) => <When at={one.parked_at} /> },
          ]}
        />
      )}
    </Section>
  );
}
