// What every page is made of: headings, states, tables, figures.
import {
  ActionIcon,
  Alert,
  Badge,
  Box,
  Button,
  Card,
  Center,
  Code,
  CopyButton,
  Group,
  Modal,
  Skeleton,
  Stack,
  Table,
  Text,
  ThemeIcon,
  Title,
  Tooltip,
} from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { notifications } from "@mantine/notifications";
import { IconAlertCircle, IconCheck, IconCopy, type Icon } from "@tabler/icons-react";
import type { UseQueryResult } from "@tanstack/react-query";
import { useEffect, useLayoutEffect, useRef, useState, type FormEvent, type ReactNode, type RefObject } from "react";
import * as format from "../format";

export function Page(properties: { title: string; about?: ReactNode; actions?: ReactNode; children: ReactNode }) {
  const { title, about, actions, children } = properties;
  useEffect(() => {
    document.title = `${title} · loramux`;
  }, [title]);
  return (
    <Stack gap="lg" maw={1240} mx="auto">
      <Group justify="space-between" align="flex-end" gap="md">
        <Box miw={0} flex="1 1 320px">
          <Title order={1} size="h2" className="long">
            {title}
          </Title>
          {about && (
            <Text c="dimmed" mt={4} maw={820}>
              {about}
            </Text>
          )}
        </Box>
        {actions && <Group gap="sm">{actions}</Group>}
      </Group>
      {children}
    </Stack>
  );
}

/** A card with a heading. */
export function Section(properties: { id?: string; title: string; about?: ReactNode; actions?: ReactNode; children: ReactNode }) {
  const { id, title, about, actions, children } = properties;
  return (
    <Card id={id}>
      <Group justify="space-between" mb="md" align="flex-start">
        <Box miw={0} flex="1 1 180px">
          <Title order={2} size="h4" className="long">
            {title}
          </Title>
          {about && (
            <Text size="sm" c="dimmed" className="long">
              {about}
            </Text>
          )}
        </Box>
        {actions}
      </Group>
      {children}
    </Card>
  );
}

/** Nothing here yet, and what to do next. */
export function Empty(properties: { icon: Icon; title: string; children: ReactNode; action?: ReactNode }) {
  const { icon: Picture, title, children, action } = properties;
  return (
    <Center py={48} px="md">
      <Stack align="center" gap="xs" maw={460} ta="center">
        <ThemeIcon size={48} radius="xl" variant="light" aria-hidden>
          <Picture size={24} />
        </ThemeIcon>
        <Text fw={600} mt="xs">
          {title}
        </Text>
        <Text c="dimmed" size="sm">
          {children}
        </Text>
        {action && <Box mt="sm">{action}</Box>}
      </Stack>
    </Center>
  );
}

export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  return (
    <Alert color="red" icon={<IconAlertCircle />} title="This could not be read" role="alert">
      <Text size="sm">{error.message}</Text>
      {retry && (
        <Button size="xs" variant="default" mt="sm" onClick={retry}>
          Try again
        </Button>
      )}
    </Alert>
  );
}

/** Show a query's data, its failure, or a placeholder of about the same height. */
export function Loaded<T>(properties: { query: UseQueryResult<T, Error>; height?: number; children: (data: T) => ReactNode }) {
  const { query, height = 220, children } = properties;
  if (query.data !== undefined) return <>{children(query.data)}</>;
  if (query.error) return <Failure error={query.error} retry={() => void query.refetch()} />;
  return <Skeleton height={height} role="img" aria-label="Loading" />;
}

export interface Column<T> {
  title: string;
  cell: (row: T) => ReactNode;
  /** Numbers are aligned at the right. */
  number?: boolean;
  width?: number | string;
  /** Buttons: on a card they have a line of their own, without the title. */
  actions?: boolean;
}

const COLUMN = { text: 150, number: 90 };
const CARDS = "cards";

/** Return whether a table is wider than its place, measured before it is painted, and until there is room for it again. */
function useIsTooWide(place: RefObject<HTMLElement | null>): boolean {
  const needed = useRef(0);
  const [isTooWide, set] = useState(false);
  useLayoutEffect(() => {
    const measured = place.current!;
    const measure = () => {
      const { clientWidth, scrollWidth } = measured;
      if (!measured.classList.contains(CARDS)) needed.current = scrollWidth > clientWidth ? scrollWidth : 0;
      set(clientWidth < needed.current);
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(measured);
    return () => observer.disconnect();
  });
  return isTooWide;
}

/** A table; if its place is too narrow for it, each row is a card, so that nothing is off the edge. */
export function DataTable<T>(properties: {
  label: string;
  columns: Column<T>[];
  rows: T[];
  keyOf: (row: T) => string;
}) {
  const { label, columns, rows, keyOf } = properties;
  const place = useRef<HTMLDivElement>(null);
  const isTooWide = useIsTooWide(place);
  // The roles are written out: on cards `display` is not a table's, and the browser would drop them.
  return (
    <div ref={place} className={isTooWide ? `listing ${CARDS}` : "listing"} role="region" tabIndex={0} aria-label={label}>
      <Table role="table" highlightOnHover aria-label={label}>
        <Table.Thead role="rowgroup">
          <Table.Tr role="row">
            {columns.map((column) => (
              <Table.Th key={column.title} role="columnheader" ta={column.number || column.actions ? "right" : "left"} w={column.width}>
                <Text size="xs" c="dimmed" fw={600} component="span">
                  {column.title}
                </Text>
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody role="rowgroup">
          {rows.map((row) => (
            <Table.Tr key={keyOf(row)} role="row">
              {columns.map((column) => (
                <Table.Td
                  key={column.title}
                  role="cell"
                  data-title={column.actions ? undefined : column.title}
                  ta={column.number || column.actions ? "right" : "left"}
                  className={column.actions ? "actions" : column.number ? "figure" : "long"}
                  miw={column.width ?? (column.number ? COLUMN.number : COLUMN.text)}
                >
                  <div>{column.cell(row)}</div>
                </Table.Td>
              ))}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

/** The buttons of one row. */
export function Actions({ children }: { children: ReactNode }) {
  return (
    <Group gap="xs" justify="flex-end" className="buttons">
      {children}
    </Group>
  );
}

/** One figure with its name and unit. */
export function Figure(properties: { label: string; value: ReactNode; unit?: string; note?: ReactNode; color?: string }) {
  const { label, value, unit, note, color } = properties;
  return (
    <Card padding="md">
      <Text size="sm" c="dimmed">
        {label}
      </Text>
      <Group gap={6} align="baseline" mt={2} wrap="nowrap">
        <Text fz={26} fw={650} lh={1.25} className="figure" c={color}>
          {value}
        </Text>
        {unit && (
          <Text size="sm" c="dimmed">
            {unit}
          </Text>
        )}
      </Group>
      <Text size="xs" c="dimmed" mih={18}>
        {note}
      </Text>
    </Card>
  );
}

const COLORS: Record<string, string> = {
  ready: "teal",
  completed: "teal",
  succeeded: "teal",
  active: "teal",
  delivered: "teal",
  live: "teal",
  validating: "blue",
  validating_files: "blue",
  queued: "blue",
  running: "blue",
  paused: "yellow",
  uploading: "blue",
  starting: "blue",
  pending: "blue",
  draining: "yellow",
  resting: "gray",
  expired: "gray",
  revoked: "gray",
  deleted: "gray",
  suspended: "red",
  rejected: "red",
  failed: "red",
  lost: "red",
};

export function State({ value }: { value: string }) {
  return <Badge color={COLORS[value] ?? "gray"}>{value}</Badge>;
}

export function When({ at }: { at: number | null | undefined }) {
  if (at == null)
    return (
      <Text component="span" size="sm" c="dimmed">
        never
      </Text>
    );
  return (
    <Tooltip label={format.date(at)}>
      <Text component="time" size="sm" className="piece" dateTime={new Date(at * 1000).toISOString()}>
        {format.ago(at)}
      </Text>
    </Tooltip>
  );
}

export function Copy({ value, label }: { value: string; label: string }) {
  return (
    <CopyButton value={value}>
      {({ copied, copy }) => (
        <Tooltip label={copied ? "Copied" : label}>
          <ActionIcon variant="subtle" color="gray" onClick={copy} aria-label={label}>
            {copied ? <IconCheck size={16} /> : <IconCopy size={16} />}
          </ActionIcon>
        </Tooltip>
      )}
    </CopyButton>
  );
}

/** A button that asks before it acts. */
export function Confirm(properties: {
  label: string;
  title: string;
  children: ReactNode;
  act: () => Promise<unknown>;
  color?: string;
  size?: string;
  variant?: string;
  disabled?: boolean;
}) {
  const { label, title, children, act, color = "red", size = "xs", variant = "default", disabled } = properties;
  const [opened, { open, close }] = useDisclosure();
  return (
    <>
      <Button size={size} variant={variant} onClick={open} disabled={disabled}>
        {label}
      </Button>
      <Modal opened={opened} onClose={close} title={<Text fw={600}>{title}</Text>}>
        <Text size="sm" component="div">
          {children}
        </Text>
        <Group justify="flex-end" mt="lg">
          <Button variant="default" onClick={close}>
            Cancel
          </Button>
          <Button
            color={color}
            onClick={() => {
              close();
              void act().catch(complain);
            }}
          >
            {label}
          </Button>
        </Group>
      </Modal>
    </>
  );
}

/** A form in a window: Enter sends it, a refusal stays in it, and it closes when the server has agreed. */
export function Dialog(properties: {
  title: string;
  submit: string;
  act: () => Promise<unknown>;
  onClose: () => void;
  /** It stays after the server has agreed: its parent shows what comes next. */
  stays?: boolean;
  disabled?: boolean;
  size?: string;
  /** A second button, such as one that removes. */
  extra?: ReactNode;
  children: ReactNode;
}) {
  const { title, submit, act, onClose, stays = false, disabled = false, size, extra, children } = properties;
  const [refused, setRefused] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  async function send(event: FormEvent) {
    event.preventDefault();
    if (disabled || isBusy) return;
    setBusy(true);
    setRefused(null);
    try {
      await act();
      if (!stays) onClose();
    } catch (error) {
      setRefused(messageOf(error));
      setBusy(false);
    }
  }
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>{title}</Text>} size={size}>
      <form onSubmit={(event) => void send(event)} noValidate>
        <Stack>
          {refused && (
            <Alert color="red" role="alert">
              {refused}
            </Alert>
          )}
          {children}
          <Group justify="flex-end">
            {extra && <Box mr="auto">{extra}</Box>}
            <Button variant="default" onClick={onClose}>
              Cancel
            </Button>
            <Button type="submit" disabled={disabled} loading={isBusy}>
              {submit}
            </Button>
          </Group>
        </Stack>
      </form>
    </Modal>
  );
}

/** A secret that the server shows once: whole, on as many lines as it needs. */
export function SecretDialog(properties: { title: string; secret: string; about?: string; onClose: () => void }) {
  const { title, secret, about = "It is not stored and cannot be shown again.", onClose } = properties;
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>{title}</Text>} closeOnClickOutside={false} size="lg">
      <Stack>
        <Alert color="yellow" title="Copy the secret now">
          {about}
        </Alert>
        <Group wrap="nowrap" gap="xs">
          <Code block className="whole" flex={1} data-testid="secret">
            {secret}
          </Code>
          <Copy value={secret} label="Copy the secret" />
        </Group>
        <Group justify="flex-end">
          <Button onClick={onClose}>I have copied it</Button>
        </Group>
      </Stack>
    </Modal>
  );
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export function complain(error: unknown) {
  notifications.show({ color: "red", title: "That did not work", message: messageOf(error), autoClose: 12_000 });
}

export function report(message: string) {
  notifications.show({ color: "teal", message, icon: <IconCheck size={18} /> });
}
