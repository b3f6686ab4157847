import { Alert, Button, Group, NumberInput, Select, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus, IconSchool } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useLocation } from "wouter";
import { api, unwrap, type FineTuningJobObject } from "../api/client";
import { SendFile } from "../components/send-file";
import { DataTable, Dialog, Empty, Loaded, Page, report, Section, State, When } from "../components/ui";
import * as format from "../format";
import { useModelNames, useSession } from "../session";

const SHOWN = 50;
const LARGEST = { epochs: 100, multiplier: 1000, rank: 4096 };
const isPlain = (value: string | number): value is number => typeof value === "number";

/** Jobs that train adapters on files of examples. */
export default function FineTuning() {
  const { can } = useSession();
  const [isOpen, dialog] = useDisclosure();
  const jobs = useQuery({ queryKey: ["fine-tuning"], queryFn: () => unwrap(api.GET("/v1/fine_tuning/jobs", { params: { query: { limit: SHOWN } } })), refetchInterval: 5_000 });
  const create = can("adapters") && (
    <Button leftSection={<IconPlus size={16} />} onClick={dialog.open}>
      Train an adapter
    </Button>
  );
  return (
    <Page title="Fine-tuning" about="Adapters that the server trains on your examples. The result is a revision, and is served at once." actions={create}>
      {isOpen && <Create onClose={dialog.close} />}
      <Section title="Jobs">
        <Loaded query={jobs}>
          {(found) =>
            found.data.length === 0 ? (
              <Empty icon={IconSchool} title="No job yet" action={create}>
                Upload a file of JSON lines, each a conversation that ends with the answer to learn, and train an adapter on it.
              </Empty>
            ) : (
              <Listing rows={found.data as FineTuningJobObject[]} />
            )
          }
        </Loaded>
      </Section>
    </Page>
  );
}

function Listing({ rows }: { rows: FineTuningJobObject[] }) {
  return (
    <DataTable
      label="Jobs"
      rows={rows}
      keyOf={(job) => job.id}
      columns={[
        {
          title: "Job",
          cell: (job) => (
            <Link href={`/fine-tuning/${job.id}`} className="row-link">
              <Text size="xs" ff="monospace">{job.id}</Text>
            </Link>
          ),
        },
        { title: "Begins with", cell: (job) => job.model },
        { title: "State", width: 150, cell: (job) => <State value={job.status} /> },
        { title: "Result", cell: (job) => job.fine_tuned_model ?? job.error?.message ?? "" },
        { title: "Trained tokens", width: 130, number: true, cell: (job) => (job.trained_tokens == null ? "" : format.count(job.trained_tokens)) },
        { title: "Since", width: 120, number: true, cell: (job) => <When at={job.created_at} /> },
      ]}
    />
  );
}

function Create({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const [, navigate] = useLocation();
  const files = useQuery({ queryKey: ["files", "fine-tune"], queryFn: () => unwrap(api.GET("/v1/files", { params: { query: { purpose: "fine-tune", limit: 100 } } })) });
  const [search, setSearch] = useState("");
  const [model, setModel] = useState<string | null>(null);
  const [training, setTraining] = useState<string | null>(null);
  const [validation, setValidation] = useState<string | null>(null);
  const [suffix, setSuffix] = useState("");
  const [epochs, setEpochs] = useState<string | number>("");
  const [multiplier, setMultiplier] = useState<string | number>("");
  const [rank, setRank] = useState<string | number>("");
  const names = useModelNames(search === model ? "" : search) ?? [];
  const choices = (files.data?.data ?? []).map((one) => ({ value: one.id, label: one.filename }));
  async function create() {
    const hyperparameters = { ...(isPlain(epochs) && { n_epochs: epochs }), ...(isPlain(multiplier) && { learning_rate_multiplier: multiplier }) };
    const made = await unwrap(
      api.POST("/v1/fine_tuning/jobs", {
        body: {
          model: model!,
          training_file: training!,
          validation_file: validation,
          suffix: suffix || null,
          method: { type: "supervised", supervised: { hyperparameters } },
          lora: isPlain(rank) ? { r: rank } : null,
        },
      }),
    );
    await queries.invalidateQueries({ queryKey: ["fine-tuning"] });
    report("The files are being checked");
    navigate(`/fine-tuning/${made.id}`);
  }
  return (
    <Dialog title="Train an adapter" submit="Train" disabled={!model || !training} act={create} onClose={onClose} size="lg">
      {files.data !== undefined && choices.length === 0 && (
        <Alert color="blue" title="First upload a file">
          A training file has ten lines at least, such as {'{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'}.
        </Alert>
      )}
      <Group>
        <SendFile label="Upload a training file" purpose="fine-tune" next="choose it here" variant="default" />
      </Group>
      <Select
        label="Model"
        description="A base model, or one of your adapters to go on from"
        searchable
        required
        data={[...new Set([model, ...names].filter((name) => name !== null))]}
        value={model}
        onChange={setModel}
        searchValue={search}
        onSearchChange={setSearch}
        nothingFoundMessage="No such model"
      />
      <Select label="Training file" required data={choices} value={training} onChange={setTraining} />
      <Select label="Validation file" description="Its loss and some answers are shown after each epoch" clearable data={choices} value={validation} onChange={setValidation} />
      <TextInput label="Name of the adapter" description="The result becomes its next revision. Empty: a new name" maxLength={63} value={suffix} onChange={(event) => setSuffix(event.currentTarget.value)} />
      <Group grow align="flex-end">
        <NumberInput label="Epochs" placeholder="automatic" min={1} max={LARGEST.epochs} allowDecimal={false} value={epochs} onChange={setEpochs} />
        <NumberInput label="Learning rate times" placeholder="automatic" min={0.001} max={LARGEST.multiplier} value={multiplier} onChange={setMultiplier} />
        <NumberInput label="Rank" placeholder="16" min={1} max={LARGEST.rank} allowDecimal={false} value={rank} onChange={setRank} />
      </Group>
    </Dialog>
  );
}
