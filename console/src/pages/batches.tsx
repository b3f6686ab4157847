import { Anchor, Progress, Text } from "@mantine/core";
import { IconFiles } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { api, headersFor, refusal, unwrap, type BatchObject } from "../api/client";
import { SendFile } from "../components/send-file";
import { Actions, complain, Confirm, DataTable, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useSession } from "../session";

const SHOWN = 50;
const UNFINISHED = ["validating", "in_progress", "finalizing"];
const ENDPOINT = "/v1/chat/completions";

/** Files of requests, answered at a lower price when there is room. */
export default function Batches() {
  const { can } = useSession();
  const batches = useQuery({ queryKey: ["batches"], queryFn: () => unwrap(api.GET("/v1/batches", { params: { query: { limit: SHOWN } } })), refetchInterval: 5_000 });
  return (
    <Page title="Batches and files" about="Files of requests that are answered when there is room, at the price of batches." actions={can("inference") && <SendFile label="Upload a file" purpose="batch" next="run it as a batch" />}>
      <Section title="Batches">
        <Loaded query={batches}>
          {(found) =>
            found.data.length === 0 ? (
              <Empty icon={IconFiles} title="No batch yet">
                Upload a file of JSON lines, each with custom_id, method, url and body, and run it as a batch.
              </Empty>
            ) : (
              <Listing rows={found.data as BatchObject[]} />
            )
          }
        </Loaded>
      </Section>
      <Files />
    </Page>
  );
}

function Listing({ rows }: { rows: BatchObject[] }) {
  const { can } = useSession();
  const queries = useQueryClient();
  return (
    <DataTable
      label="Batches"
      rows={rows}
      keyOf={(batch) => batch.id}
      columns={[
        { title: "Batch", cell: (batch) => <><Text size="xs" ff="monospace">{batch.id}</Text>{batch.metadata && <Text size="xs" c="dimmed">{Object.entries(batch.metadata).map(([name, value]) => `${name}: ${value}`).join(", ")}</Text>}</> },
        { title: "State", width: 120, cell: (batch) => <State value={batch.status} /> },
        { title: "Lines", width: 190, cell: (batch) => <Lines batch={batch} /> },
        { title: "Problem", cell: (batch) => <Problem errors={batch.errors?.data ?? []} /> },
        { title: "Since", width: 140, number: true, cell: (batch) => <When at={batch.created_at} /> },
        {
          title: "Action",
          width: 190,
          actions: true,
          cell: (batch) => (
            <Actions>
              {batch.output_file_id && <Download id={batch.output_file_id}>Answers</Download>}
              {batch.error_file_id && <Download id={batch.error_file_id}>Errors</Download>}
              {can("inference") && UNFINISHED.includes(batch.status) && (
                <Confirm
                  label="Cancel it"
                  title="Cancel the batch?"
                  act={async () => {
                    await unwrap(api.POST("/v1/batches/{batch_id}/cancel", { params: { path: { batch_id: batch.id } } }));
                    await queries.invalidateQueries({ queryKey: ["batches"] });
                  }}
                >
                  No further line begins; the answers so far are in the output file, and billed.
                </Confirm>
              )}
            </Actions>
          ),
        },
      ]}
    />
  );
}

function Problem({ errors }: { errors: { line?: number | null; message: string }[] }) {
  const first = errors[0];
  if (first === undefined) return null;
  return (
    <Text size="sm">
      {first.line != null && `Line ${format.count(first.line)}: `}
      {first.message}
      {errors.length > 1 && ` And ${format.count(errors.length - 1)} more.`}
    </Text>
  );
}

function Lines({ batch }: { batch: BatchObject }) {
  const { total, completed, failed } = batch.request_counts;
  return (
    <>
      <Progress value={total > 0 ? (100 * (completed + failed)) / total : 0} aria-label={`${completed + failed} of ${total} lines`} />
      <Text size="xs" c="dimmed" className="figure">
        {format.count(completed)} of {format.count(total)}
        {failed > 0 && `, ${format.count(failed)} failed`}
      </Text>
    </>
  );
}

/** The answers to the cookie are never shown as a page: the file is saved. */
function Download({ id, children }: { id: string; children: string }) {
  async function save() {
    const answer = await fetch(`/v1/files/${id}/content`, { headers: headersFor("GET") });
    if (!answer.ok) throw refusal(await answer.json().catch(() => null), answer.status);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = `${id}.jsonl`;
    link.click();
    URL.revokeObjectURL(link.href);
  }
  return (
    <Anchor component="button" size="sm" onClick={() => void save().catch(complain)}>
      {children}
    </Anchor>
  );
}

function Files() {
  const { can } = useSession();
  const queries = useQueryClient();
  const files = useQuery({ queryKey: ["files"], queryFn: () => unwrap(api.GET("/v1/files", { params: { query: { limit: SHOWN } } })) });
  async function run(id: string) {
    await unwrap(api.POST("/v1/batches", { body: { input_file_id: id, endpoint: ENDPOINT } }));
    await queries.invalidateQueries({ queryKey: ["batches"] });
    report("The batch is being checked");
  }
  return (
    <Section title="Files" about="They are deleted by themselves after their time.">
      <Loaded query={files} height={120}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No files.
            </Text>
          ) : (
            <DataTable
              label="Files"
              rows={found.data}
              keyOf={(file) => file.id}
              columns={[
                { title: "Name", cell: (file) => <b>{file.filename}</b> },
                { title: "Purpose", width: 130, cell: (file) => file.purpose },
                { title: "Size", width: 100, number: true, cell: (file) => format.bytes(file.bytes) },
                { title: "Deleted", width: 140, number: true, cell: (file) => <When at={file.expires_at} /> },
                {
                  title: "Action",
                  width: 220,
                  actions: true,
                  cell: (file) => (
                    <Actions>
                      <Download id={file.id}>Save</Download>
                      {can("inference") && file.purpose === "batch" && (
                        <Confirm label="Run" color="teal" title={`Run ${file.filename} as a batch?`} act={() => run(file.id)}>
                          Its lines are checked first; none runs where one is wrong. They are chat completions.
                        </Confirm>
                      )}
                      {can("inference") && (
                        <Confirm
                          label="Delete"
                          title={`Delete ${file.filename}?`}
                          act={async () => {
                            await unwrap(api.DELETE("/v1/files/{file_id}", { params: { path: { file_id: file.id } } }));
                            await queries.invalidateQueries({ queryKey: ["files"] });
                          }}
                        >
                          Its bytes are gone at once.
                        </Confirm>
                      )}
                    </Actions>
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
