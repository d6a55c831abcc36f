// Every view: its name in the address, its title, its key, and for a view inside another where Escape leads.
import { SAVED } from "../lib/api.js";
import { AnswersView } from "./answers_view.js";
import { ConfigurationView } from "./configuration_view.js";
import { CurvesView } from "./curves_view.js";
import { GroupView } from "./group_view.js";
import { NowView } from "./now_view.js";
import { OverviewView } from "./overview_view.js";
import { ReplaysView } from "./replays_view.js";
import { RolloutView } from "./rollout_view.js";
import { RolloutsView } from "./rollouts_view.js";
import { StarredView } from "./starred_view.js";
import { TaskView } from "./task_view.js";
import { TasksView } from "./tasks_view.js";
import { TimeView } from "./time_view.js";
import { ValidationView } from "./validation_view.js";

export const VIEWS = [
  { name: "overview", title: "Overview", key: "o", component: OverviewView, isOfRuns: true },
  { name: "curves", title: "Curves", key: "c", component: CurvesView, isOfRuns: true },
  { name: "time", title: "Time", key: "", component: TimeView, isOfRuns: true },
  { name: "now", title: "Now", key: "n", component: NowView },
  { name: "configuration", title: "Configuration", key: "", component: ConfigurationView },
  { name: "rollouts", title: "Rollouts", key: "r", component: RolloutsView },
  { name: "answers", title: "Answers", key: "a", component: AnswersView },
  { name: "tasks", title: "Tasks", key: "", component: TasksView },
  { name: "validation", title: "Validation", key: "v", component: ValidationView },
  { name: "starred", title: "Starred", key: "s", component: StarredView, isHidden: Boolean(SAVED) },
  { name: "replays", title: "Replays", key: "", component: ReplaysView },
  { name: "rollout", title: "Rollout", within: "rollouts", component: RolloutView, isHidden: true, parent: ({ path }) => ["rollouts", path[1]] },
  { name: "group", title: "Group", within: "rollouts", component: GroupView, isHidden: true, parent: ({ path }) => ["rollouts", path[1]] },
  { name: "task", title: "Task", within: "tasks", component: TaskView, isHidden: true, parent: () => ["tasks"] },
];

export function viewOf(name) {
  return VIEWS.find((view) => view.name === name) ?? null;
}
