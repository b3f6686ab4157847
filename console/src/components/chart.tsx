// Stacked bars over time, and the same figures as a table for readers without the picture.
import { Box, useComputedColorScheme, useMantineTheme, VisuallyHidden } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { BarController, BarElement, CategoryScale, Chart, Legend, LinearScale, Tooltip } from "chart.js";
import { useEffect, useRef } from "react";
import * as format from "../format";

Chart.defaults.font.family = "'Inter Variable', system-ui, sans-serif";
Chart.register(BarController, BarElement, CategoryScale, Legend, LinearScale, Tooltip);

const COLORS = ["teal.6", "indigo.5", "orange.5", "grape.5", "cyan.6", "pink.5"];
const MOST_SERIES = COLORS.length;
/** What is too small to be named, here or by the server. */
const OTHERS = "others";
/** Longer names lose their middle in the legend: revisions of one adapter differ at the end. */
const LEGEND_CHARACTERS = 40;
/** Pixels of one line of the legend; on a narrow screen each name has its own. */
const LEGEND_LINE = 22;
/** Below it, labels have seconds: minutes would repeat. */
const SHORT_SECONDS = 600;

export interface Point {
  at: number;
  values: Record<string, number>;
}

interface Properties {
  label: string;
  points: Point[];
  hourly: boolean;
  height?: number;
  show?: (value: number) => string;
}

export default function TimeBars({ label, points, hourly, height = 260, show = format.count }: Properties) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const chart = useRef<Chart<"bar"> | null>(null);
  const theme = useMantineTheme();
  const isDark = useComputedColorScheme("light") === "dark";
  const isNarrow = useMediaQuery("(max-width: 36em)");
  const legend = isNarrow ? seriesOf(points).length * LEGEND_LINE : 0;

  useEffect(() => {
    const made = new Chart(canvas.current!, { type: "bar", data: { labels: [], datasets: [] } });
    chart.current = made;
    return () => made.destroy();
  }, []);

  useEffect(() => {
    const ink = isDark ? theme.colors.dark[1] : theme.colors.gray[7];
    const lines = isDark ? theme.colors.dark[5] : theme.colors.gray[2];
    const names = seriesOf(points);
    const shown = chart.current!;
    const lasts = points.length > 0 ? points.at(-1)!.at - points[0]!.at : 0;
    const clock = lasts < SHORT_SECONDS ? format.clockWithSecondsOf : format.clockOf;
    shown.data.labels = points.map((point) => (hourly ? clock(point.at) : format.dayOf(point.at)));
    shown.data.datasets = names.map((name, place) => {
      const [color, shade] = COLORS[place % COLORS.length]!.split(".") as [string, string];
      return {
        label: shortened(name),
        data: points.map((point) => valueOf(point, name, names)),
        backgroundColor: name === OTHERS ? ink : theme.colors[color]![Number(shade)],
        maxBarThickness: 32,
        borderRadius: 2,
      };
    });
    shown.options = {
      animation: false,
      maintainAspectRatio: false,
      interaction: { mode: "index", intersect: false },
      plugins: {
        legend: { display: names.length > 1, align: "start", labels: { color: ink, boxWidth: 10, boxHeight: 10, padding: 14 } },
        tooltip: {
          filter: (item) => Number(item.raw) > 0,
          callbacks: { label: (item) => `${item.dataset.label}: ${show(Number(item.raw))}` },
        },
      },
      scales: {
        x: { stacked: true, grid: { display: false }, ticks: { color: ink, maxRotation: 0, autoSkipPadding: 24 } },
        y: {
          stacked: true,
          beginAtZero: true,
          border: { display: false },
          grid: { color: lines },
          ticks: { color: ink, maxTicksLimit: 6, callback: (value) => format.short(Number(value)) },
        },
      },
    };
    shown.update();
  }, [points, hourly, isDark, show, theme]);

  return (
    <Box component="figure" m={0} aria-label={label}>
      <Box h={height + legend} pos="relative" aria-hidden>
        <canvas ref={canvas} />
      </Box>
      <VisuallyHidden>
        <table>
          <caption>{label}</caption>
          <tbody>
            {points
              .filter((point) => Object.values(point.values).some((value) => value > 0))
              .map((point) => (
                <tr key={point.at}>
                  <th scope="row">{format.date(point.at)}</th>
                  <td>
                    {Object.entries(point.values)
                      .map(([name, value]) => `${name}: ${show(value)}`)
                      .join(", ")}
                  </td>
                </tr>
              ))}
          </tbody>
        </table>
      </VisuallyHidden>
    </Box>
  );
}

function shortened(name: string): string {
  const half = (LEGEND_CHARACTERS - 1) / 2;
  return name.length <= LEGEND_CHARACTERS ? name : `${name.slice(0, Math.ceil(half))}…${name.slice(-Math.floor(half))}`;
}

/** The names with the largest sums; the rest are `others` together. */
function seriesOf(points: Point[]): string[] {
  const totals = new Map<string, number>();
  for (const point of points) {
    for (const [name, value] of Object.entries(point.values)) totals.set(name, (totals.get(name) ?? 0) + value);
  }
  const named = [...totals.keys()].filter((name) => name !== OTHERS);
  const sorted = named.sort((a, b) => totals.get(b)! - totals.get(a)!);
  if (sorted.length <= MOST_SERIES && !totals.has(OTHERS)) return sorted;
  return [...sorted.slice(0, MOST_SERIES - 1), OTHERS];
}

function valueOf(point: Point, name: string, names: string[]): number {
  if (name !== OTHERS) return point.values[name] ?? 0;
  return Object.entries(point.values).reduce((sum, [one, value]) => (one !== OTHERS && names.includes(one) ? sum : sum + value), 0);
}
