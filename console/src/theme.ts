import { Badge, Button, Card, createTheme, Modal, Table, type CSSVariablesResolver, type MantineColorsTuple } from "@mantine/core";

// One accent; every shade from the sixth on has a contrast of 4.5 with white.
const teal: MantineColorsTuple = [
  "#effaf8",
  "#d7f2ed",
  "#aee5dc",
  "#7fd3c7",
  "#4fbcae",
  "#27a092",
  "#127c71",
  "#0f6a61",
  "#0d574f",
  "#0a443e",
];

// Greys with a little of the accent, so that cards and page belong together.
const dark: MantineColorsTuple = [
  "#d3dcdb",
  "#b4c0be",
  "#8f9c9a",
  "#5f6c6a",
  "#3c4847",
  "#2c3736",
  "#1b2322",
  "#151c1b",
  "#101515",
  "#0b0f0f",
];

/** Text of pale badges and alerts, dark enough on their ground. */
const INKS = { orange: "#9a3a06", yellow: "#7a5200", gray: "#3d4449", red: "#b02525", blue: "#145591" };

/** Secondary text keeps a contrast of 4.5 on every ground that it stands on. */
export const resolver: CSSVariablesResolver = (theme) => ({
  variables: {},
  light: { "--mantine-color-dimmed": theme.colors.gray[7], "--mantine-color-placeholder": theme.colors.gray[7],
    ...Object.fromEntries(Object.entries(INKS).map(([color, ink]) => [`--mantine-color-${color}-light-color`, ink])),
  },
  // the pale accent of badges and of the page that one is on: its own would be darker than the ground
  dark: {
    "--mantine-color-dimmed": theme.colors.dark[1],
    "--mantine-color-placeholder": theme.colors.dark[2],
    "--mantine-color-teal-light": "#12423b",
    "--mantine-color-teal-light-hover": "#164d45",
    "--mantine-color-teal-light-color": "#c9efe8",
    "--mantine-color-gray-light": theme.colors.dark[5],
    "--mantine-color-gray-light-color": theme.colors.dark[0],
  },
});

export const theme = createTheme({
  primaryColor: "teal",
  primaryShade: { light: 6, dark: 6 },
  colors: { teal, dark },
  autoContrast: true,
  fontFamily: "'Inter Variable', system-ui, -apple-system, 'Segoe UI', sans-serif",
  fontFamilyMonospace: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace",
  headings: { fontFamily: "'Inter Variable', system-ui, sans-serif", fontWeight: "650" },
  defaultRadius: "md",
  cursorType: "pointer",
  components: {
    Card: Card.extend({ defaultProps: { withBorder: true, padding: "lg", radius: "md" } }),
    // A badge says all that it has to say: it grows, and never cuts a word.
    Badge: Badge.extend({
      defaultProps: { variant: "light", radius: "sm", tt: "none", fw: 550 },
      styles: {
        root: { height: "auto", minHeight: "var(--badge-height)", maxWidth: "100%", overflow: "visible" },
        label: { whiteSpace: "normal", overflow: "visible", overflowWrap: "break-word" },
      },
    }),
    Button: Button.extend({ defaultProps: { fw: 550 } }),
    Modal: Modal.extend({
      defaultProps: { centered: true, radius: "lg", overlayProps: { backgroundOpacity: 0.45 }, closeButtonProps: { "aria-label": "Close" } },
      styles: { title: { minWidth: 0, overflowWrap: "anywhere" } },
    }),
    Table: Table.extend({ defaultProps: { verticalSpacing: "sm", horizontalSpacing: "md" } }),
  },
});
