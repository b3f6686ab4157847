// What keeps a release honest: its policy, its guard, and the evaluations of its revisions.
import { Anchor, Badge, Button, Group, NumberInput, Select, Stack, Switch, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link } from "wouter";
import { api, unwrap, type EvaluationObject, type GuardObject, type PolicyCheck, type PolicyObject, type RevisionObject } from "../api/client";
import * as format from "../format";
import { complain, DataTable, Dialog, Loaded, report, Section, State, When } from "./ui";

/** The guard of an alias, and the policy that promotions must pass. */
export function Protection({ name, alias, candidate, mayChange }: { name: string; alias: string; candidate: number; mayChange: boolean }) {
  const queries = useQueryClient();
  const [isEditing, edit] = useDisclosure();
  const path = { name, alias };
  const guard = useQuery({
    queryKey: ["adapter", name, "guard", alias],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}/aliases/{alias}/guard", { params: { path } })) as Promise<GuardObject>,
  });
  const policy = useQuery({
    queryKey: ["adapter", name, "policy", alias, candidate],
    queryFn: () =>
      unwrap(api.GET("/v1/adapters/{name}/aliases/{alias}/policy", { params: { path, query: { revision: candidate || undefined } } })) as Promise<PolicyObject>,
  });
  async function setGuard(on: boolean) {
    if (on) await unwrap(api.PUT("/v1/adapters/{name}/aliases/{alias}/guard", { params: { path }, body: { measures: ["errors"] } }));
    else await unwrap(api.DELETE("/v1/adapters/{name}/aliases/{alias}/guard", { params: { path } }));
    await queries.invalidateQueries({ queryKey: ["adapter", name, "guard"] });
    report(on ? "A canary that fails more often is taken back by itself" : "The canary stays where it is");
  }
  return (
    <Stack gap="xs">
      <Loaded query={guard} height={36}>
        {(found) => (
          <Group gap="xs">
            <Switch
              label="Take a canary back that is found worse"
              checked={found.measures.length > 0}
              disabled={!mayChange}
              onChange={(event) => void setGuard(event.currentTarget.checked).catch(complain)}
            />
            {found.measures.map((measure) => (
              <Badge key={measure} color="gray">
                {measure}
              </Badge>
            ))}
          </Group>
        )}
      </Loaded>
      <Loaded query={policy} height={36}>
        {(found) => (
          <>
            <Group justify="space-between" gap="xs">
              {found.policy === null ? (
                <Text size="sm" c="dimmed">
                  No release policy: the alias moves as it is told.
                </Text>
              ) : (
                <Group gap="xs">
                  <Text size="sm" fw={600}>
                    Release policy
                  </Text>
                  {found.revision !== null && found.checks.length > 0 && (
                    <Badge color={found.passed ? "teal" : "red"}>
                      {found.passed ? `@${found.revision} passes` : `@${found.revision} may not take most requests`}
                    </Badge>
                  )}
                </Group>
              )}
              {mayChange && (
                <Button size="xs" variant="default" onClick={edit.open}>
                  {found.policy === null ? "Set a policy" : "Edit the policy"}
                </Button>
              )}
            </Group>
            <Checks found={found} />
            {isEditing && <PolicyEditor name={name} alias={alias} policy={found.policy} onClose={edit.close} />}
          </>
        )}
      </Loaded>
    </Stack>
  );
}

type Demands = Record<keyof typeof DEMANDS, number | string>;

/** The rules that are numbers, in the units of their fields: shares are percent here. */
const DEMANDS = {
  min_requests: { label: "Answered requests, at least", unit: " requests", percent: false },
  max_error_rate: { label: "Failed requests, at most", unit: " %", percent: true },
  max_first_token_p99_seconds: { label: "First token of 99 in 100 requests, within", unit: " s", percent: false },
  min_tokens_per_second: { label: "Speed of an answer, at least", unit: " tokens/s", percent: false },
} as const;

function PolicyEditor({ name, alias, policy, onClose }: { name: string; alias: string; policy: PolicyObject["policy"]; onClose: () => void }) {
  const queries = useQueryClient();
  const path = { name, alias };
  const names = Object.keys(DEMANDS) as (keyof typeof DEMANDS)[];
  const [demands, setDemands] = useState<Demands>(() => {
    const known = (one: keyof typeof DEMANDS) => policy?.[one] ?? "";
    return Object.fromEntries(names.map((one) => [one, DEMANDS[one].percent && known(one) !== "" ? Number(known(one)) * 100 : known(one)])) as Demands;
  });
  const [evaluates, setEvaluates] = useState(policy?.evaluation != null);
  const [margin, setMargin] = useState<number | string>(100 * (policy?.evaluation?.margin ?? 0));
  const [questions, setQuestions] = useState<number | string>(policy?.evaluation?.min_questions ?? 30);
  const isEmpty = !evaluates && names.every((one) => demands[one] === "");

  async function done(acting: Promise<unknown>, message: string) {
    await acting;
    await queries.invalidateQueries({ queryKey: ["adapter", name, "policy"] });
    report(message);
  }
  const save = () => {
    const numbers = names.filter((one) => demands[one] !== "").map((one) => [one, Number(demands[one]) / (DEMANDS[one].percent ? 100 : 1)]);
    const evaluation = evaluates ? { ...policy?.evaluation, margin: Number(margin) / 100, min_questions: Number(questions) } : undefined;
    const body = { policy: { ...Object.fromEntries(numbers), ...(evaluation && { evaluation }) } };
    return done(unwrap(api.PUT("/v1/adapters/{name}/aliases/{alias}/policy", { params: { path }, body })), "The policy is asked before the alias moves");
  };
  const remove = () =>
    done(unwrap(api.DELETE("/v1/adapters/{name}/aliases/{alias}/policy", { params: { path } })), "The alias moves as it is told").then(onClose);
  return (
    <Dialog
      title={`Release policy of ${alias}`}
      submit="Save"
      disabled={isEmpty}
      act={save}
      onClose={onClose}
      extra={
        policy !== null && (
          <Button variant="default" c="red" onClick={() => void remove().catch(complain)}>
            Remove the policy
          </Button>
        )
      }
    >
      <Text size="sm">
        A revision takes most of the alias's requests only if it has shown this, in the last 30 days. A smaller share, a canary, is always allowed.
      </Text>
      {names.map((one) => (
        <NumberInput
          key={one}
          label={DEMANDS[one].label}
          placeholder="not demanded"
          suffix={DEMANDS[one].unit}
          min={0}
          max={DEMANDS[one].percent ? 100 : undefined}
          allowDecimal={one !== "min_requests"}
          thousandSeparator=","
          value={demands[one]}
          onChange={(value) => setDemands((before) => ({ ...before, [one]: value }))}
        />
      ))}
      <Switch label="Its newest evaluation must not find it worse" checked={evaluates} onChange={(event) => setEvaluates(event.currentTarget.checked)} />
      {evaluates && (
        <Group grow align="flex-start">
          <NumberInput label="Questions, at least" suffix=" questions" min={1} allowDecimal={false} value={questions} onChange={setQuestions} />
          <NumberInput label="May be worse by" description="of the score" suffix=" %" min={0} max={100} value={margin} onChange={setMargin} />
        </Group>
      )}
    </Dialog>
  );
}

/** The names of the rules, as a reader says them. */
const RULES: Record<string, string> = {
  evaluation: "Evaluation",
  min_requests: "Answered requests",
  max_error_rate: "Failed requests",
  max_first_token_p99_seconds: "First token",
  min_tokens_per_second: "Speed of an answer",
};

/** A check in words: its rule by name, and its whole numbers with separators. */
function saidOf({ rule, message }: PolicyCheck): string {
  const said = message.startsWith(`${rule}: `) ? message.slice(rule.length + 2) : message;
  return `${RULES[rule] ?? rule}: ${said.replace(/(?<![.\w])\d{4,}(?![.\w])/g, (number) => format.count(Number(number)))}`;
}

function Checks({ found }: { found: PolicyObject }) {
  return found.checks.map((check) => (
    <Group key={check.rule} gap={8} wrap="nowrap" align="flex-start">
      <Text size="sm" c={check.passed ? "teal" : "red"} fw={700} aria-label={check.passed ? "passed" : "not passed"}>
        {check.passed ? "✓" : "✗"}
      </Text>
      <Text size="sm" className="long">
        {saidOf(check)}
      </Text>
    </Group>
  ));
}

/** Evaluations: two revisions answer the same questions, and a grader compares them. */
export function Evaluations({ name, revisions, mayStart }: { name: string; revisions: RevisionObject[]; mayStart: boolean }) {
  const [isMaking, make] = useDisclosure();
  const evaluations = useQuery({
    queryKey: ["adapter", name, "evaluations"],
    queryFn: () => unwrap(api.GET("/v1/evaluations", { params: { query: { adapter: name, limit: 50 } } })),
    refetchInterval: 5_000,
  });
  return (
    <Section
      title="Evaluations"
      about="Two revisions answer the questions of a file, as a batch; the answers are graded in pairs."
      actions={
        mayStart && (
          <Button size="xs" onClick={make.open} disabled={revisions.filter((one) => one.state === "ready").length < 2}>
            Evaluate
          </Button>
        )
      }
    >
      {isMaking && <Start name={name} revisions={revisions} onClose={make.close} />}
      <Loaded query={evaluations}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No evaluation yet. It needs two revisions, and a file of purpose "evals" with lines of prompt and expected.
            </Text>
          ) : (
            <Listing rows={found.data as EvaluationObject[]} />
          )
        }
      </Loaded>
    </Section>
  );
}

function Listing({ rows }: { rows: EvaluationObject[] }) {
  return (
    <DataTable
      label="Evaluations"
      rows={rows}
      keyOf={(one) => one.id}
      columns={[
        { title: "Candidate", width: 100, cell: (one) => <b>@{one.models[0]?.split("@")[1]}</b> },
        { title: "Against", width: 90, cell: (one) => `@${one.models[1]?.split("@")[1]}` },
        { title: "Grader", width: 110, cell: (one) => one.grader.type },
        { title: "State", width: 110, cell: (one) => <State value={one.status} /> },
        { title: "Result", cell: (one) => <Result one={one} /> },
        { title: "Since", width: 140, number: true, cell: (one) => <When at={one.created_at} /> },
      ]}
    />
  );
}

function Result({ one }: { one: EvaluationObject }) {
  if (one.error) return <Text size="sm">{one.error}</Text>;
  if (!one.result) return <>–</>;
  const { candidate, against, difference, questions } = one.result;
  return (
    <Text size="sm" className="figure">
      {format.share(candidate.score.mean)} against {format.share(against.score.mean)} on {format.count(questions)} questions, difference{" "}
      {format.share(difference.low)} to {format.share(difference.high)}
    </Text>
  );
}

function Start({ name, revisions, onClose }: { name: string; revisions: RevisionObject[]; onClose: () => void }) {
  const queries = useQueryClient();
  const ready = revisions.filter((one) => one.state === "ready").map((one) => `${one.revision}`);
  const files = useQuery({ queryKey: ["files", "evals"], queryFn: () => unwrap(api.GET("/v1/files", { params: { query: { purpose: "evals", limit: 100 } } })) });
  const [candidate, setCandidate] = useState<string | null>(ready[0] ?? null);
  const [against, setAgainst] = useState<string | null>(ready[1] ?? null);
  const [file, setFile] = useState<string | null>(null);
  const [grader, setGrader] = useState<string | null>("exact");
  async function start() {
    const type = grader as "exact" | "contains" | "label";
    await unwrap(
      api.POST("/v1/evaluations", {
        body: { adapter: name, revision: Number(candidate), against: Number(against), file_id: file!, grader: { type } },
      }),
    );
    await queries.invalidateQueries({ queryKey: ["adapter", name, "evaluations"] });
    report("The evaluation runs");
  }
  return (
    <Dialog title="Evaluate a revision" submit="Evaluate" disabled={!file || !candidate || candidate === against} act={start} onClose={onClose}>
      <Group grow>
        <Select label="Candidate" data={ready.map(named)} value={candidate} onChange={setCandidate} allowDeselect={false} />
        <Select label="Against" data={ready.map(named)} value={against} onChange={setAgainst} allowDeselect={false} />
      </Group>
      <Select
        label="Questions"
        description={<>A file of purpose evals. <Anchor component={Link} href="/batches" size="xs">Files</Anchor></>}
        data={(files.data?.data ?? []).map((one) => ({ value: one.id, label: one.filename }))}
        value={file}
        onChange={setFile}
      />
      <Select label="Grader" data={["exact", "contains", "label"]} value={grader} onChange={setGrader} allowDeselect={false} />
    </Dialog>
  );
}

const named = (revision: string) => ({ value: revision, label: `@${revision}` });
