// One alias of an adapter: who answers, a chosen revision as a canary, promote, roll back, history.
import { Badge, Button, Group, Select, Slider, Stack, Text } from "@mantine/core";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type AliasObject, type AliasVersionObject, type RevisionObject, type WeightedRevision } from "../api/client";
import * as format from "../format";
import { Protection } from "./quality";
import { complain, Confirm, DataTable, Loaded, report, Section, When } from "./ui";

const DEFAULT = "default";
const WHOLE = 1000;

interface Properties {
  name: string;
  alias: AliasObject;
  revisions: RevisionObject[];
  mayChange: boolean;
}

export function Release({ name, alias, revisions, mayChange }: Properties) {
  const queries = useQueryClient();
  const path = { name, alias: alias.name };
  const history = useQuery({
    queryKey: ["adapter", name, "history", alias.name, alias.version],
    queryFn: () => unwrap(api.GET("/v1/adapters/{name}/aliases/{alias}/history", { params: { path } })),
  });
  const targets = [...alias.targets].sort((a, b) => b.revision - a.revision);
  const whole = targets.reduce((sum, target) => sum + target.weight, 0);
  const stable = targets.reduce((most, target) => (target.weight >= most.weight ? target : most)).revision;
  const ready = revisions.filter((one) => one.state === "ready").map((one) => one.revision);
  const others = ready.filter((one) => targets.length > 1 || one !== stable);
  const proposed = (targets.length > 1 ? targets.map((one) => one.revision) : others).find((one) => one !== stable) ?? null;
  const [chosen, choose] = useState<number | null>(null);
  const candidate = chosen !== null && others.includes(chosen) ? chosen : proposed;

  async function changed(doing: Promise<unknown>, message: string) {
    await doing;
    choose(null);
    await queries.invalidateQueries({ queryKey: ["adapter"] });
    report(message);
  }
  const point = (weights: WeightedRevision[], message: string) =>
    changed(unwrap(api.PUT("/v1/adapters/{name}/aliases/{alias}", { params: { path }, body: { targets: weights } })), message);
  const promote = (revision: number) =>
    changed(
      unwrap(api.POST("/v1/adapters/{name}/promote", { params: { path: { name } }, body: { revision, alias: alias.name } })),
      `@${revision} answers alone now`,
    );
  const restore = (version: number, message: string) =>
    changed(unwrap(api.POST("/v1/adapters/{name}/aliases/{alias}/rollback", { params: { path, query: { version } } })), message);

  const back = earlier(history.data?.data ?? [], new Set(ready));
  return (
    <Section
      title={alias.name === DEFAULT ? "Default alias" : `Alias ${alias.name}`}
      about={alias.name === DEFAULT ? "What requests without an alias get." : `What requests to ${name}:${alias.name} get.`}
      actions={
        mayChange && (
          <Group gap="xs">
            {back && (
              <Text size="sm" c="dimmed">
                before: {saidOf(back.targets)}
              </Text>
            )}
            <Confirm
              label="Roll back"
              title={back ? `Roll back to ${saidOf(back.targets)}?` : "Roll back?"}
              act={() => restore(back!.version, "Rolled back")}
              disabled={!back}
              color="orange"
            >
              {name}:{alias.name} goes from {saidOf(targets)} to {back && saidOf(back.targets)}: what it had before change #{back && back.version + 1}.
            </Confirm>
          </Group>
        )
      }
    >
      <Stack gap="md">
        {targets.map((target) => (
          <Share key={target.revision} revision={target.revision} part={target.weight / whole} isNew={target.revision !== stable} />
        ))}
        {mayChange && candidate !== null && (
          <Candidate
            key={`${alias.version} ${candidate}`}
            candidate={candidate}
            choices={others}
            choose={choose}
            rest={targets.filter((one) => one.revision !== candidate)}
            now={Math.round((100 * (targets.find((one) => one.revision === candidate)?.weight ?? 0)) / whole)}
            apply={point}
            promote={promote}
          />
        )}
        <Protection name={name} alias={alias.name} candidate={candidate ?? 0} mayChange={mayChange} />
        <Loaded query={history} height={120}>
          {(versions) => <History name={`${name}:${alias.name}`} versions={versions.data} ready={new Set(ready)} now={alias.version} mayChange={mayChange} restore={restore} />}
        </Loaded>
      </Stack>
    </Section>
  );
}

/** `@1 90%, @2 10%`: targets with their shares; one alone has all. */
function saidOf(targets: WeightedRevision[]): string {
  const whole = targets.reduce((sum, target) => sum + target.weight, 0);
  if (targets.length === 1) return `@${targets[0]!.revision}`;
  return targets.map((target) => `@${target.revision} ${format.share(target.weight / whole)}`).join(", ");
}

/** The version that a rollback restores, as the server finds it: a second one goes further back. `history` is newest first. */
function earlier(history: AliasVersionObject[], callable: Set<number>): AliasVersionObject | null {
  const present = history[0];
  if (!present) return null;
  const restoredBy = (version: AliasVersionObject) => history.find((one) => one.version === version.restores);
  let origin = present;
  for (let restored = restoredBy(origin); restored; restored = restoredBy(origin)) origin = restored;
  const keyOf = (version: AliasVersionObject) => JSON.stringify([...version.targets].sort((a, b) => a.revision - b.revision));
  return history.find((one) => one.version < origin.version && keyOf(one) !== keyOf(present) && isCallable(one, callable)) ?? null;
}

const isCallable = (version: AliasVersionObject, callable: Set<number>) =>
  version.targets.length > 0 && version.targets.every((target) => callable.has(target.revision));

interface HistoryProperties {
  name: string;
  versions: AliasVersionObject[];
  ready: Set<number>;
  /** The present version. */
  now: number;
  mayChange: boolean;
  restore: (version: number, message: string) => Promise<void>;
}

function History({ name, versions, ready, now, mayChange, restore }: HistoryProperties) {
  return (
    <DataTable
      label={`History of ${name}`}
      rows={versions}
      keyOf={(version) => `${version.version}`}
      columns={[
        { title: "Change", width: 80, cell: (version) => `#${version.version}` },
        {
          title: "Targets",
          cell: (version) => version.targets.map((target) => `@${target.revision} × ${target.weight}`).join(", ") || "removed",
        },
        { title: "By", cell: (version) => <Text size="sm" className="long">{version.changed_by_name ?? version.changed_by}</Text> },
        { title: "When", width: 140, number: true, cell: (version) => <When at={version.changed_at} /> },
        {
          title: "Action",
          width: 110,
          actions: true,
          cell: (version) =>
            mayChange &&
            version.version !== now &&
            isCallable(version, ready) && (
              <Confirm
                label="Restore"
                title={`Back to ${saidOf(version.targets)}?`}
                color="orange"
                act={() => restore(version.version, `${saidOf(version.targets)} answers again`)}
              >
                {name} gets the targets that it had by change #{version.version}.
              </Confirm>
            ),
        },
      ]}
    />
  );
}

function Share({ revision, part, isNew }: { revision: number; part: number; isNew: boolean }) {
  return (
    <Group gap="md" wrap="nowrap">
      <Text fw={600} miw={48} className="figure">
        @{revision}
      </Text>
      <div className="part" style={{ flex: 1 }}>
        <i style={{ width: `${part * 100}%`, background: `var(--mantine-color-${isNew ? "orange" : "teal"}-6)` }} />
      </div>
      <Text miw={48} ta="right" className="figure">
        {format.share(part)}
      </Text>
      <Group miw={68} justify="flex-end">
        <Badge color={isNew ? "orange" : "teal"}>{isNew ? "canary" : "stable"}</Badge>
      </Group>
    </Group>
  );
}

interface CandidateProperties {
  candidate: number;
  /** Revisions that may be released. */
  choices: number[];
  choose: (revision: number) => void;
  /** The other targets, which keep their proportions. */
  rest: WeightedRevision[];
  now: number;
  apply: (targets: WeightedRevision[], message: string) => Promise<void>;
  promote: (revision: number) => Promise<void>;
}

/** Any revision as a canary by slider, or alone. */
function Candidate({ candidate, choices, choose, rest, now, apply, promote }: CandidateProperties) {
  const [weight, setWeight] = useState(now);
  const [isBusy, setBusy] = useState(false);
  function run(doing: Promise<void>) {
    setBusy(true);
    void doing.catch(complain).finally(() => setBusy(false));
  }
  const give = () => {
    if (weight === 100) return promote(candidate);
    if (weight === 0) return apply(rest, `@${candidate} is taken back`);
    return apply([...scaled(rest, 100 - weight), { revision: candidate, weight: rest.length === 1 ? weight : weight * (WHOLE / 100) }], `@${candidate} gets ${weight}%`);
  };
  return (
    <Group align="flex-end" gap="lg" pt="xs">
      <Select
        label="Release"
        w={110}
        data={choices.map((one) => ({ value: `${one}`, label: `@${one}` }))}
        value={`${candidate}`}
        onChange={(value) => value && choose(Number(value))}
        allowDeselect={false}
        searchable={choices.length > 10}
      />
      <div style={{ flex: "1 1 320px", paddingBottom: 20 }}>
        <Text size="sm" mb={6}>
          Share of requests for <b>@{candidate}</b>, the rest for <b>{rest.map((one) => `@${one.revision}`).join(", ")}</b>. One user always gets the same revision.
        </Text>
        <Slider
          value={weight}
          onChange={setWeight}
          step={1}
          label={(value) => `${value}%`}
          marks={[0, 25, 50, 75, 100].map((value) => ({ value, label: `${value}%` }))}
          thumbLabel={`Percent of requests for revision ${candidate}`}
        />
      </div>
      <Group gap="xs">
        <Button variant="default" disabled={weight === now} loading={isBusy} onClick={() => run(give())}>
          {weight === 0 ? "Take the canary back" : `Give it ${weight}%`}
        </Button>
        <Button disabled={isBusy} onClick={() => run(promote(candidate))}>
          Promote @{candidate}
        </Button>
      </Group>
    </Group>
  );
}

/** Weights in the same proportions that add up to so many percent; a single one gets the percent as they are. */
function scaled(targets: WeightedRevision[], percent: number): WeightedRevision[] {
  if (targets.length === 1) return [{ revision: targets[0]!.revision, weight: percent }];
  const whole = targets.reduce((sum, target) => sum + target.weight, 0);
  const units = (percent * WHOLE) / 100;
  return targets.map(({ revision, weight }) => ({ revision, weight: Math.max(1, Math.round((weight * units) / whole)) }));
}
