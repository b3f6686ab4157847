// The frame around the pages: navigation, who is signed in, light or dark.
import {
  ActionIcon,
  AppShell,
  Badge,
  Box,
  Burger,
  Button,
  Center,
  Divider,
  Group,
  Loader,
  Menu,
  NavLink,
  ScrollArea,
  Text,
  UnstyledButton,
  VisuallyHidden,
  useComputedColorScheme,
  useMantineColorScheme,
} from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import {
  IconActivity,
  IconBolt,
  IconBook2,
  IconBuilding,
  IconCalculator,
  IconChartBar,
  IconChevronDown,
  IconEye,
  IconFileInvoice,
  IconFiles,
  IconGauge,
  IconKey,
  IconLayoutDashboard,
  IconLogout,
  IconMessages,
  IconMoon,
  IconSchool,
  IconServer2,
  IconStairs,
  IconStack2,
  IconSun,
  IconUsers,
  IconWebhook,
  type Icon,
} from "@tabler/icons-react";
import { lazy, Suspense, useEffect } from "react";
import { Link, Route, Router, Switch, useLocation } from "wouter";
import { complain, Failure } from "./components/ui";
import { SessionProvider, useSession, useSessionQuery } from "./session";

import { Adapters } from "./pages/adapters";
import { Overview } from "./pages/overview";
import { SignIn } from "./pages/sign-in";

const Activity = lazy(() => import("./pages/activity"));
const Adapter = lazy(() => import("./pages/adapter").then(({ Adapter }) => ({ default: Adapter })));
const Batches = lazy(() => import("./pages/batches"));
const FineTuning = lazy(() => import("./pages/fine-tuning"));
const FineTuningJob = lazy(() => import("./pages/fine-tuning-job"));
const Invoices = lazy(() => import("./pages/invoices"));
const Keys = lazy(() => import("./pages/keys"));
const Ledger = lazy(() => import("./pages/ledger"));
const Limits = lazy(() => import("./pages/limits"));
const People = lazy(() => import("./pages/people"));
const Plan = lazy(() => import("./pages/plan"));
const Playground = lazy(() => import("./pages/playground"));
const System = lazy(() => import("./pages/system"));
const Tenant = lazy(() => import("./pages/tenant"));
const Tenants = lazy(() => import("./pages/tenants"));
const Tiers = lazy(() => import("./pages/tiers"));
const Usage = lazy(() => import("./pages/usage"));
const Webhooks = lazy(() => import("./pages/webhooks"));

interface Place {
  path: string;
  label: string;
  icon: Icon;
  scope: string;
}

const CUSTOMER: Place[] = [
  { path: "/", label: "Overview", icon: IconLayoutDashboard, scope: "read" },
  { path: "/adapters", label: "Adapters", icon: IconStack2, scope: "read" },
  { path: "/playground", label: "Playground", icon: IconMessages, scope: "inference" },
  { path: "/batches", label: "Batches and files", icon: IconFiles, scope: "inference" },
  { path: "/fine-tuning", label: "Fine-tuning", icon: IconSchool, scope: "adapters" },
  { path: "/usage", label: "Usage and cost", icon: IconChartBar, scope: "usage" },
  { path: "/limits", label: "Limits", icon: IconGauge, scope: "read" },
  { path: "/invoices", label: "Invoices", icon: IconFileInvoice, scope: "billing" },
  { path: "/keys", label: "Keys", icon: IconKey, scope: "keys" },
  { path: "/people", label: "Projects and members", icon: IconUsers, scope: "read" },
  { path: "/webhooks", label: "Webhooks", icon: IconWebhook, scope: "webhooks" },
  { path: "/activity", label: "Activity", icon: IconActivity, scope: "read" },
];
const OPERATOR: Place[] = [
  { path: "/operator", label: "System", icon: IconServer2, scope: "operator" },
  { path: "/operator/tenants", label: "Tenants", icon: IconBuilding, scope: "operator" },
  { path: "/operator/tiers", label: "Tiers", icon: IconStairs, scope: "operator" },
  { path: "/operator/ledger", label: "Ledger and sinks", icon: IconBook2, scope: "operator" },
  { path: "/operator/plan", label: "Planner", icon: IconCalculator, scope: "operator" },
];

/** Pages with pages below them. */
const PARENTS = ["/adapters", "/fine-tuning", "/operator/tenants"];
/** Scopes that a look at another tenant never has. */
const OF_OWN_TENANT = ["inference", "adapters"];
const LANDED = "loramux-landed";

export function App() {
  const session = useSessionQuery();
  if (session.data) {
    return (
      <SessionProvider key={session.data.id} session={session.data}>
        <Router base="/console">
          <Landing />
          <Shell />
        </Router>
      </SessionProvider>
    );
  }
  if (session.error) {
    return (
      <Center h="100vh" p="md">
        <Failure error={session.error} retry={() => void session.refetch()} />
      </Center>
    );
  }
  return session.data === null ? <SignIn /> : <Waiting />;
}

/** An operator that arrives at the root lands on the System page: once a session, so that the overview stays within reach. */
function Landing() {
  const { session, isOperator, viewing } = useSession();
  const [location, navigate] = useLocation();
  useEffect(() => {
    const isFirst = sessionStorage.getItem(LANDED) !== session.id;
    sessionStorage.setItem(LANDED, session.id);
    if (isFirst && isOperator && viewing === null && location === "/") navigate("/operator", { replace: true });
  }, []); // only at the arrival
  return null;
}

function Waiting() {
  return (
    <Center h="60vh">
      <Loader aria-label="Loading" />
    </Center>
  );
}

function Shell() {
  const [opened, { toggle, close }] = useDisclosure();
  const { viewing } = useSession();
  const [location] = useLocation();
  useEffect(close, [location, close]);
  return (
    <AppShell
      header={{ height: 56 }}
      navbar={{ width: 248, breakpoint: "md", collapsed: { mobile: !opened } }}
      padding={{ base: "md", sm: "xl" }}
    >
      <a className="skip" href="#main">
        Skip to the page
      </a>
      <AppShell.Header>
        <Group h="100%" px="md" justify="space-between" wrap="nowrap">
          <Group gap="sm" wrap="nowrap">
            <Burger opened={opened} onClick={toggle} hiddenFrom="md" size="sm" aria-label="Navigation" />
            <Link href="/" className="row-link">
              <Group gap={8} wrap="nowrap">
                <img src="/console/icon.svg" width={26} height={26} alt="" />
                <Text fw={700} fz="lg" component="span">
                  loramux
                </Text>
              </Group>
            </Link>
          </Group>
          <Group gap="xs" wrap="nowrap">
            <Brightness />
            <Account />
          </Group>
        </Group>
      </AppShell.Header>
      <AppShell.Navbar p="sm" aria-label="Pages">
        <ScrollArea type="auto">
          <Navigation />
        </ScrollArea>
      </AppShell.Navbar>
      <AppShell.Main id="main" tabIndex={-1}>
        {viewing && <Viewing tenant={viewing} />}
        <Suspense fallback={<Waiting />}>
          <Pages key={viewing} />
        </Suspense>
      </AppShell.Main>
    </AppShell>
  );
}

function Pages() {
  return (
    <Switch>
      <Route path="/" component={Overview} />
      <Route path="/adapters" component={Adapters} />
      <Route path="/adapters/:name">{({ name }) => <Adapter key={name} name={name} />}</Route>
      <Route path="/playground" component={Playground} />
      <Route path="/batches" component={Batches} />
      <Route path="/fine-tuning" component={FineTuning} />
      <Route path="/fine-tuning/:id">{({ id }) => <FineTuningJob key={id} id={id} />}</Route>
      <Route path="/usage" component={Usage} />
      <Route path="/limits" component={Limits} />
      <Route path="/invoices" component={Invoices} />
      <Route path="/keys" component={Keys} />
      <Route path="/people" component={People} />
      <Route path="/webhooks" component={Webhooks} />
      <Route path="/activity" component={Activity} />
      <Route path="/operator" component={System} />
      <Route path="/operator/tenants" component={Tenants} />
      <Route path="/operator/tenants/:name">{({ name }) => <Tenant key={name} name={name} />}</Route>
      <Route path="/operator/tiers" component={Tiers} />
      <Route path="/operator/ledger" component={Ledger} />
      <Route path="/operator/plan" component={Plan} />
      <Route>
        <Text>
          There is no such page. <Link href="/">Go to the overview</Link>
        </Text>
      </Route>
    </Switch>
  );
}

function Navigation() {
  const { session, viewing } = useSession();
  const isShown = (place: Place) => session.scopes.includes(place.scope) || (viewing !== null && !OF_OWN_TENANT.includes(place.scope));
  const operator = OPERATOR.filter((place) => session.scopes.includes(place.scope));
  return (
    <>
      {CUSTOMER.filter(isShown).map((place) => (
        <Entry key={place.path} place={place} />
      ))}
      {operator.length > 0 && <Divider my="sm" label="Operator" labelPosition="left" />}
      {operator.map((place) => (
        <Entry key={place.path} place={place} />
      ))}
    </>
  );
}

function Entry({ place }: { place: Place }) {
  const [location] = useLocation();
  const isHere = location === place.path || (PARENTS.includes(place.path) && location.startsWith(`${place.path}/`));
  return (
    <NavLink
      component={Link}
      href={place.path}
      label={place.label}
      active={isHere}
      aria-current={isHere ? "page" : undefined}
      leftSection={<place.icon size={18} stroke={1.7} aria-hidden />}
      py={6}
      fw={isHere ? 600 : 450}
      style={{ borderRadius: "var(--mantine-radius-md)" }}
    />
  );
}

function Viewing({ tenant }: { tenant: string }) {
  const { view } = useSession();
  return (
    <Group bg="var(--mantine-color-yellow-light)" px="md" py="xs" mb="lg" justify="space-between" bdrs="md" role="status">
      <Group gap="xs" wrap="nowrap" miw={0} flex="1 1 220px">
        <IconEye size={18} style={{ flexShrink: 0 }} aria-hidden />
        <Text size="sm" className="long">
          You look at <b>{tenant}</b>, read-only. Its audit log says so.
        </Text>
      </Group>
      <Button size="xs" variant="default" onClick={() => void view(null)}>
        Back to my own tenant
      </Button>
    </Group>
  );
}

function Brightness() {
  const { setColorScheme } = useMantineColorScheme();
  const isDark = useComputedColorScheme("light") === "dark";
  const label = isDark ? "Use light colours" : "Use dark colours";
  return (
    <ActionIcon variant="subtle" color="gray" size="lg" aria-label={label} onClick={() => setColorScheme(isDark ? "light" : "dark")}>
      {isDark ? <IconSun size={18} /> : <IconMoon size={18} />}
    </ActionIcon>
  );
}

function Account() {
  const { session, tenant, isOperator, signOut } = useSession();
  return (
    <Menu position="bottom-end" width={260}>
      <Menu.Target>
        <UnstyledButton px="xs" py={6}>
          <Group gap={8} wrap="nowrap">
            <VisuallyHidden>Account of </VisuallyHidden>
            <Box maw={{ base: 120, sm: 160 }}>
              <Text fw={600} size="sm" truncate>
                {tenant}
              </Text>
            </Box>
            {isOperator && <Badge size="sm" visibleFrom="sm">operator</Badge>}
            <IconChevronDown size={14} aria-hidden />
          </Group>
        </UnstyledButton>
      </Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>
          Signed in as {session.role ?? "key"} of {session.tenant}
        </Menu.Label>
        <Menu.Item leftSection={<IconLogout size={16} />} onClick={() => void signOut().catch(complain)}>
          Sign out
        </Menu.Item>
        <Menu.Item leftSection={<IconBolt size={16} />} onClick={() => void signOut(true).catch(complain)}>
          Sign out everywhere
        </Menu.Item>
      </Menu.Dropdown>
    </Menu>
  );
}
