// Who else may call an adapter, and a candidate that runs beside its requests.
import { Button, Checkbox, Group, NumberInput, Select, SimpleGrid, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, ApiError, unwrap, type RevisionObject, type ShadowReport } from "../api/client";
import * as format from "../format";
import { Confirm, DataTable, Dialog, Figure, Loaded, report, Section, State, When } from "./ui";

/** Grants: other tenants call the adapter at their own cost, and get none of its files. */
export function Grants({ name, mayChange }: { name: string; mayChange: boolean }) {
  const queries = useQueryClient();
  const [isSharing, share] = useDisclosure();
  const queryKey = ["adapter", name, "grants"];
  const grants = useQuery({ queryKey, queryFn: () => unwrap(api.GET("/v1/adapters/{name}/grants", { params: { path: { name } } })) });
  return (
    <Section
      title="Shared with"
      about="Other tenants that may call it, at their own cost and without access to its files."
      actions={
        mayChange && (
          <Button size="xs" leftSection={<IconPlus size={14} />} onClick={share.open}>
            Share it
          </Button>
        )
      }
    >
      {isSharing && <Share name={name} onClose={share.close} />}
      <Loaded query={grants} height={80}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              With nobody: only this tenant calls it.
            </Text>
          ) : (
            <DataTable
              label="Grants"
              rows={found.data}
              keyOf={(grant) => grant.tenant}
              columns={[
                { title: "Tenant", cell: (grant) => <b>{grant.tenant}</b> },
                { title: "By", cell: (grant) => grant.granted_by_name ?? grant.granted_by },
                { title: "Since", width: 140, cell: (grant) => <When at={grant.granted_at} /> },
                {
                  title: "Action",
                  width: 110,
                  actions: true,
                  cell: (grant) =>
                    mayChange && (
                      <Confirm
                        label="Revoke"
                        title={`Share it with ${grant.tenant} no longer?`}
                        act={async () => {
                          await unwrap(api.DELETE("/v1/adapters/{name}/grants/{tenant}", { params: { path: { name, tenant: grant.tenant } } }));
                          await queries.invalidateQueries({ queryKey });
                          report(`${grant.tenant} can call it no longer`);
                        }}
                      >
                        Its requests get 404 from the next one on; running ones finish.
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

function Share({ name, onClose }: { name: string; onClose: () => void }) {
  const queries = useQueryClient();
  const [tenant, setTenant] = useState("");
  async function save() {
    await unwrap(api.PUT("/v1/adapters/{name}/grants/{tenant}", { params: { path: { name, tenant: tenant.trim() } } }));
    await queries.invalidateQueries({ queryKey: ["adapter", name, "grants"] });
    report(`If there is a tenant ${tenant.trim()}, it can call ${name} now`);
  }
  return (
    <Dialog title={`Share ${name}`} submit="Share it" disabled={!tenant.trim()} act={save} onClose={onClose}>
      <TextInput label="Tenant" description="Its exact name; the server does not say whether there is such a tenant" value={tenant} maxLength={63} onChange={(event) => setTenant(event.currentTarget.value)} data-autofocus />
    </Dialog>
  );
}

/** A shadow: a share of the requests is repeated on a candidate, unseen by their callers, and the answers are compared. */
export function Shadow({ name, revisions, mayChange }: { name: string; revisions: RevisionObject[]; mayChange: boolean }) {
  const queries = useQueryClient();
  const [isStarting, start] = useDisclosure();
  const path = { name };
  const queryKey = ["adapter", name, "shadow"];
  const shadow = useQuery({
    queryKey,
    queryFn: async () => {
      try {
        return (await unwrap(api.GET("/v1/adapters/{name}/shadow", { params: { path } }))) as ShadowReport;
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return null;
        throw error;
      }
    },
    refetchInterval: 10_000,
  });
  const runs = shadow.data != null && shadow.data.ended_at === null;
  return (
    <Section
      title="Shadow"
      about="A share of your own requests to the default alias also runs on a candidate, when there is room. Callers do not see it; the answers are compared."
      actions={
        mayChange &&
        (runs ? (
          <Confirm
            label="End the shadow"
            title={`End the shadow of @${shadow.data!.revision}?`}
            act={async () => {
              await unwrap(api.DELETE("/v1/adapters/{name}/shadow", { params: { path } }));
              await queries.invalidateQueries({ queryKey });
              report("The shadow has ended");
            }}
          >
            Its figures stay.
          </Confirm>
        ) : (
          <Button size="xs" onClick={start.open} disabled={revisions.filter((one) => one.state === "ready").length < 2}>
            Start a shadow
          </Button>
        ))
      }
    >
      {isStarting && <StartShadow name={name} revisions={revisions} onClose={start.close} />}
      <Loaded query={shadow} height={120}>
        {(found) =>
          found === null ? (
            <Text size="sm" c="dimmed">
              No shadow yet. Its candidate is a revision that does not have all requests.
            </Text>
          ) : (
            <Figures shadow={found} />
          )
        }
      </Loaded>
    </Section>
  );
}

/** What is compared, in words. */
const MEASURES: Record<string, string> = {
  exact: "The same answer",
  prefix: "The same beginning, part of the answer",
  similarity: "Likeness of the texts",
  length_ratio: "Length, against the current answer",
  same_finish_reason: "Ended for the same reason",
  cosine: "Likeness of the vectors",
  same_label: "The same label",
  valid_current: "Valid JSON, current revision",
  valid_candidate: "Valid JSON, candidate",
  valid_difference: "Valid JSON, difference",
};

function Figures({ shadow }: { shadow: ShadowReport }) {
  const { compared, failed, dropped } = shadow.requests;
  const skipped = Object.values(dropped).reduce((sum, one) => sum + one, 0);
  const why = Object.entries(dropped)
    .filter(([, count]) => count > 0)
    .map(([reason, count]) => `${reason.replaceAll("_", " ")} ${format.count(count)}`)
    .join(", ");
  const measures = Object.entries(shadow.measures);
  return (
    <Stack>
      <Group gap="xs">
        <State value={shadow.ended_at === null ? "running" : "ended"} />
        <Text size="sm">
          @{shadow.revision} on {format.share(shadow.share)} of the requests, since <When at={shadow.created_at} />
          {shadow.ended_because && `; ended: ${shadow.ended_because.replaceAll("_", " ")}`}
        </Text>
      </Group>
      <SimpleGrid cols={{ base: 2, md: 4 }}>
        <Figure label="Compared" value={format.count(compared)} unit="requests" />
        <Figure label="Failed on the candidate" value={format.count(failed)} unit="requests" color={failed > 0 ? "red" : undefined} />
        <Figure label="Not run" value={format.count(skipped)} unit="requests" note={why} />
        <Figure label="Tokens today" value={format.short(shadow.tokens_today)} note={`of ${format.short(shadow.max_tokens_per_day)} a day`} />
      </SimpleGrid>
      {measures.length > 0 && (
        <DataTable
          label="How alike the answers are"
          rows={measures}
          keyOf={([measure]) => measure}
          columns={[
            { title: "Measure", cell: ([measure]) => MEASURES[measure] ?? measure.replaceAll("_", " ") },
            { title: "Mean", number: true, cell: ([, found]) => format.significant(found.mean) },
            { title: "95% of the time", number: true, width: 150, cell: ([, found]) => `${format.significant(found.low)} to ${format.significant(found.high)}` },
            { title: "Requests", number: true, cell: ([, found]) => format.count(found.requests) },
          ]}
        />
      )}
    </Stack>
  );
}

function StartShadow({ name, revisions, onClose }: { name: string; revisions: RevisionObject[]; onClose: () => void }) {
  const queries = useQueryClient();
  const ready = revisions.filter((one) => one.state === "ready").map((one) => `${one.revision}`);
  const idle = revisions.find((one) => one.state === "ready" && !one.aliases.includes("default"));
  const [revision, setRevision] = useState<string | null>(idle ? `${idle.revision}` : (ready[0] ?? null));
  const [share, setShare] = useState<number | string>(10);
  const [tokens, setTokens] = useState<number | string>(1_000_000);
  const [keeps, setKeeps] = useState(false);
  async function start() {
    const body = { revision: Number(revision), share: Number(share) / 100, max_tokens_per_day: Number(tokens), keep_outputs: keeps };
    await unwrap(api.POST("/v1/adapters/{name}/shadow", { params: { path: { name } }, body }));
    await queries.invalidateQueries({ queryKey: ["adapter", name, "shadow"] });
    report(`@${revision} runs beside the requests`);
  }
  return (
    <Dialog title="Start a shadow" submit="Start the shadow" disabled={!revision || share === "" || tokens === ""} act={start} onClose={onClose}>
      <Select label="Candidate" data={ready.map((one) => ({ value: one, label: `@${one}` }))} value={revision} onChange={setRevision} allowDeselect={false} />
      <NumberInput label="Share of the requests" suffix=" %" min={0.1} max={100} value={share} onChange={setShare} />
      <NumberInput label="Tokens a day, at most" description="Prompt and answer tokens on the candidate; a day of UTC" min={1} allowDecimal={false} thousandSeparator="," value={tokens} onChange={setTokens} />
      <Checkbox label="Keep both answers of each request in files" checked={keeps} onChange={(event) => setKeeps(event.currentTarget.checked)} />
    </Dialog>
  );
}
