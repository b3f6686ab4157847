import { Anchor, Button, MultiSelect, NumberInput, Select, Stack, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link } from "wouter";
import { api, unwrap, type TierObject } from "../api/client";
import { LimitForm } from "../components/limits";
import { Actions, Confirm, Dialog, Loaded, Page, report, Section } from "../components/ui";
import * as format from "../format";
import { LimitRows } from "./tenant";

const CLASSES = ["interactive", "standard", "batch"];
const SERVICE_TIERS = ["flex", "priority", "batch"];
const DEFAULT_TIER = "standard";

/** Tiers: the class, the weight and the limits that their tenants share. */
export default function Tiers() {
  const [isMaking, make] = useDisclosure();
  const tiers = useQuery({ queryKey: ["operator", "tiers"], queryFn: () => unwrap(api.GET("/admin/tiers")) });
  return (
    <Page
      title="Tiers"
      about={
        <>
          What tenants of a tier get.{" "}
          <Anchor component={Link} href="/operator/tenants">
            Tenants
          </Anchor>
        </>
      }
      actions={
        <Button leftSection={<IconPlus size={16} />} onClick={make.open}>
          New tier
        </Button>
      }
    >
      {isMaking && <Edit onClose={make.close} />}
      <Loaded query={tiers}>
        {(found) => (
          <Stack gap="lg">
            {found.data.map((tier) => (
              <Tier key={tier.name} tier={tier} />
            ))}
          </Stack>
        )}
      </Loaded>
    </Page>
  );
}

function Tier({ tier }: { tier: TierObject }) {
  const queries = useQueryClient();
  const [isEditing, edit] = useDisclosure();
  const [isSetting, set] = useDisclosure();
  const path = { tier: tier.name };
  const queryKey = ["operator", "tiers", tier.name, "limits"];
  const limits = useQuery({ queryKey, queryFn: () => unwrap(api.GET("/admin/tiers/{tier}/limits", { params: { path } })) });
  const services = tier.service_tiers.length > 0 ? `requests may ask for ${tier.service_tiers.join(", ")}` : "requests may ask for no other service";
  return (
    <Section
      title={tier.name}
      about={`Class ${tier.service_class}, weight ${format.count(tier.weight)}; ${services}.`}
      actions={
        <Actions>
          <Button size="xs" variant="default" onClick={edit.open}>
            Change
          </Button>
          <Button size="xs" variant="default" onClick={set.open}>
            Set a limit
          </Button>
          {tier.name !== DEFAULT_TIER && (
            <Confirm
              label="Delete"
              title={`Delete the tier ${tier.name}?`}
              act={async () => {
                await unwrap(api.DELETE("/admin/tiers/{name}", { params: { path: { name: tier.name } } }));
                await queries.invalidateQueries({ queryKey: ["operator", "tiers"] });
                report(`The tier ${tier.name} is deleted`);
              }}
            >
              No tenant may be in it.
            </Confirm>
          )}
        </Actions>
      }
    >
      {isEditing && <Edit tier={tier} onClose={edit.close} />}
      {isSetting && (
        <LimitForm
          title={`Limit of the tier ${tier.name}`}
          save={async (name, value) => {
            await unwrap(api.PUT("/admin/tiers/{tier}/limits/{name}", { params: { path: { ...path, name } }, body: { value } }));
            await queries.invalidateQueries({ queryKey });
            report("The limit applies from the next request on");
          }}
          onClose={set.close}
        />
      )}
      <Loaded query={limits} height={60}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No limits.
            </Text>
          ) : (
            <LimitRows
              rows={found.data}
              mayRemove={() => true}
              remove={async ({ name }) => {
                await unwrap(api.DELETE("/admin/tiers/{tier}/limits/{name}", { params: { path: { ...path, name } } }));
                await queries.invalidateQueries({ queryKey });
                report("The limit is removed");
              }}
            />
          )
        }
      </Loaded>
    </Section>
  );
}

function Edit({ tier, onClose }: { tier?: TierObject; onClose: () => void }) {
  const queries = useQueryClient();
  const [name, setName] = useState(tier?.name ?? "");
  const [serviceClass, setServiceClass] = useState(tier?.service_class ?? "standard");
  const [weight, setWeight] = useState<number | string>(tier?.weight ?? 1);
  const [services, setServices] = useState(tier?.service_tiers ?? ["batch", "flex"]);
  async function save() {
    const body = { service_class: serviceClass, weight: Number(weight), service_tiers: services };
    await unwrap(api.PUT("/admin/tiers/{name}", { params: { path: { name: name.trim() } }, body }));
    await queries.invalidateQueries({ queryKey: ["operator", "tiers"] });
    report(`The tier ${name.trim()} applies from its tenants' next requests on`);
  }
  return (
    <Dialog title={tier ? `Tier ${tier.name}` : "New tier"} submit="Save" disabled={!name.trim() || weight === ""} act={save} onClose={onClose}>
      <TextInput label="Name" value={name} disabled={tier !== undefined} maxLength={63} onChange={(event) => setName(event.currentTarget.value)} data-autofocus />
      <Select label="Class" description="Interactive requests are served before standard ones, and these before batches, by shares" data={CLASSES} value={serviceClass} onChange={(value) => setServiceClass(value ?? serviceClass)} allowDeselect={false} />
      <NumberInput label="Weight" description="A tenant's part of the class, beside the others': 1 to 1,000" min={1} max={1000} allowDecimal={false} value={weight} onChange={setWeight} />
      <MultiSelect label="Service tiers" description="What requests may ask for beside the default" data={SERVICE_TIERS} value={services} onChange={setServices} />
    </Dialog>
  );
}
