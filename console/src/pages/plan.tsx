import { Alert, Button, Group, Progress, Select, SimpleGrid, Slider, Stack, Text } from "@mantine/core";
import { useMutation, useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type PlanObject } from "../api/client";
import { DataTable, Figure, Loaded, Page, Section } from "../components/ui";
import * as format from "../format";

/** Sliders: steps grow with the value. */
const KNOBS = [
  { key: "rate", label: "Requests per second", values: [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], start: 4 },
  { key: "prompt_tokens", label: "Prompt tokens, mean", values: [50, 100, 200, 500, 1000, 2000, 4000], start: 3 },
  { key: "output_tokens", label: "Answer tokens, mean", values: [10, 20, 50, 100, 200, 500, 1000], start: 3 },
  { key: "adapters", label: "Adapters", values: [0, 1, 10, 50, 100, 500, 1000, 2000], start: 3 },
  { key: "rank", label: "Rank", values: [8, 16, 32, 64, 128], start: 1 },
  { key: "tenants", label: "Tenants", values: [1, 5, 20, 100, 500], start: 1 },
  { key: "ttft_ms", unit: "ms", label: "Goal: first token, P99", values: [100, 250, 500, 1000, 2000, 5000], start: 3 },
  { key: "itl_ms", unit: "ms", label: "Goal: between two tokens, P99", values: [10, 20, 50, 100, 200], start: 3 },
] as const;
type Knob = (typeof KNOBS)[number]["key"];

/** What-if: how many GPUs a workload needs, by simulating the server's own scheduler. */
export default function Plan() {
  const choices = useQuery({ queryKey: ["operator", "plan"], queryFn: () => unwrap(api.GET("/admin/plan")), staleTime: Infinity });
  const [places, setPlaces] = useState(Object.fromEntries(KNOBS.map((knob) => [knob.key, knob.start])) as Record<Knob, number>);
  const [gpu, setGpu] = useState<string | null>(null);
  const [model, setModel] = useState<string | null>(null);
  const plan = useMutation({
    mutationFn: () => {
      const values = Object.fromEntries(KNOBS.map((knob) => [knob.key, knob.values[places[knob.key]]])) as Record<Knob, number>;
      return unwrap(api.POST("/admin/plan", { body: { ...values, gpu: gpu ?? choices.data!.gpus[0]!, model: model ?? choices.data!.models[0]! } }));
    },
  });
  return (
    <Page title="Planner" about="How many GPUs a workload needs, and with which settings: the server's own scheduler, simulated. A question takes up to 90 seconds.">
      <Loaded query={choices}>
        {(found) => (
          <Section title="Workload">
            <SimpleGrid cols={{ base: 1, sm: 2 }} spacing="xl" verticalSpacing="lg">
              <Select label="GPU" data={found.gpus} value={gpu ?? found.gpus[0]!} onChange={setGpu} allowDeselect={false} />
              <Select label="Base model" data={found.models} value={model ?? found.models[0]!} onChange={setModel} allowDeselect={false} />
              {KNOBS.map((knob) => (
                <div key={knob.key}>
                  <Text size="sm" mb={4}>
                    {knob.label}: <b className="figure">{format.count(knob.values[places[knob.key]]!)}</b>
                    {"unit" in knob && ` ${knob.unit}`}
                  </Text>
                  <Slider
                    min={0}
                    max={knob.values.length - 1}
                    step={1}
                    label={(place) => format.count(knob.values[place]!)}
                    value={places[knob.key]}
                    onChange={(place) => setPlaces((before) => ({ ...before, [knob.key]: place }))}
                    thumbLabel={knob.label}
                  />
                </div>
              ))}
            </SimpleGrid>
            <Group justify="flex-end" mt="xl">
              <Button loading={plan.isPending} onClick={() => plan.mutate()}>
                Make a plan
              </Button>
            </Group>
          </Section>
        )}
      </Loaded>
      {plan.error && (
        <Alert color="red" role="alert" title="There is no plan">
          {plan.error.message}
        </Alert>
      )}
      {plan.data && <Found plan={plan.data} />}
    </Page>
  );
}

function Found({ plan }: { plan: PlanObject }) {
  const best = plan.recommended;
  const worst = Math.max(...plan.tried.map((trial) => trial.ttft_ms_p99), 1);
  return (
    <Stack>
      <SimpleGrid cols={{ base: 2, md: 4 }}>
        <Figure label="GPUs" value={format.count(best.gpus)} note={plan.goals_met ? "the goals are kept" : "no candidate keeps the goals: this one is closest"} color={plan.goals_met ? "teal" : "red"} />
        <Figure label="First token, P99" value={format.duration(best.ttft_ms_p99 / 1000)} />
        <Figure label="Between tokens, P99" value={format.duration(best.itl_ms_p99 / 1000)} />
        <Figure label="Cost" value={format.money(best.dollars_per_million_tokens, "USD")} note="per million tokens" />
      </SimpleGrid>
      <Section title="Simulated" about="Each line is one simulation; the bar is the first token's P99.">
        <DataTable
          label="Simulations"
          rows={plan.tried.map((trial, place) => ({ ...trial, place }))}
          keyOf={(trial) => `${trial.place}`}
          minWidth={720}
          columns={[
            { title: "GPUs", width: 70, number: true, cell: (trial) => format.count(trial.gpus) },
            { title: "Tokens of a step", width: 110, number: true, cell: (trial) => format.count(trial.max_num_batched_tokens) },
            { title: "Sequences", width: 90, number: true, cell: (trial) => format.count(trial.max_num_seqs) },
            { title: "First token, P99", cell: (trial) => <Progress value={(100 * trial.ttft_ms_p99) / worst} aria-label={`First token, P99: ${format.duration(trial.ttft_ms_p99 / 1000)}`} /> },
            { title: "", width: 90, number: true, cell: (trial) => format.duration(trial.ttft_ms_p99 / 1000) },
            { title: "Pool in use", width: 100, number: true, cell: (trial) => format.share(trial.pool_use) },
            { title: "$ / million", width: 100, number: true, cell: (trial) => trial.dollars_per_million_tokens.toFixed(3) },
          ]}
        />
      </Section>
    </Stack>
  );
}
