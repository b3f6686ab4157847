// What every page is made of: headings, states, tables, figures.
import {
  ActionIcon,
  Alert,
  Badge,
  Box,
  Button,
  Card,
  Center,
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
import { useEffect, type ReactNode } from "react";
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
  return <Skeleton height={height} aria-label="Loading" />;
}

export interface Column<T> {
  title: string;
  cell: (row: T) => ReactNode;
  /** Numbers stand at the right. */
  number?: boolean;
  width?: number | string;
}

export function DataTable<T>(properties: {
  label: string;
  columns: Column<T>[];
  rows: T[];
  keyOf: (row: T) => string;
  minWidth?: number;
}) {
  const { label, columns, rows, keyOf, minWidth = 640 } = properties;
  return (
    <Table.ScrollContainer minWidth={minWidth} scrollAreaProps={{ viewportProps: { tabIndex: 0, "aria-label": label, role: "region" } }}>
      <Table highlightOnHover aria-label={label}>
        <Table.Thead>
          <Table.Tr>
            {columns.map((column) => (
              <Table.Th key={column.title} ta={column.number ? "right" : "left"} w={column.width}>
                <Text size="xs" c="dimmed" fw={600} component="span">
                  {column.title}
                </Text>
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {rows.map((row) => (
            <Table.Tr key={keyOf(row)}>
              {columns.map((column) => (
                <Table.Td key={column.title} ta={column.number ? "right" : "left"} className={column.number ? "figure" : "long"} miw={column.width ?? (column.number ? 90 : 150)}>
                  {column.cell(row)}
                </Table.Td>
              ))}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </Table.ScrollContainer>
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
  active: "teal",
  delivered: "teal",
  live: "teal",
  validating: "blue",
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
  return (
    <Badge color={COLORS[value] ?? "gray"} miw="max-content">
      {value}
    </Badge>
  );
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
      <Text component="time" size="sm" dateTime={new Date(at * 1000).toISOString()}>
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

export function complain(error: unknown) {
  const message = error instanceof Error ? error.message : String(error);
  notifications.show({ color: "red", title: "That did not work", message, autoClose: 12_000 });
}

export function report(message: string) {
  notifications.show({ color: "teal", message, icon: <IconCheck size={18} /> });
}
