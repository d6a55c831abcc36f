// The rollouts of a group side by side, the best first.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatNumber, printable } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { rolloutLink, taskLink } from "../lib/rollouts.js";
import { linkTo } from "../lib/route.js";
import { Chat } from "../chat/chat.js";
import { AnswerCard } from "../parts/answer_card.js";
import { Answer, Empty } from "../parts/notice.js";
import { Title } from "../parts/title.js";

export function GroupView({ run, path }) {
  const answer = useApi(["runs", run.id, "groups", ...path]);
  const missing = html`<${Title} text=${`Group ${path[1]} of step ${path[0]}`} note=${run.name}><a href=${linkTo(["rollouts", path[0]])}>rollouts of step ${path[0]}</a><//>`;
  return html`<${Answer} of=${answer} what="the group" title=${missing}>${(group) => html`<${Group} key=${path.join("/")} group=${group} run=${run} step=${path[0]} number=${path[1]} />`}<//>`;
}

function Group({ group, run, step, number }) {
  const [current, setCurrent] = useState(0);
  const rollouts = group.rollouts;
  const move = (by) => setCurrent(Math.min(Math.max(current + by, 0), rollouts.length - 1));
  useKeys({
    ArrowRight: ["next rollout", () => move(1)],
    ArrowLeft: ["rollout before", () => move(-1)],
    j: ["next rollout", () => move(1)],
    k: ["rollout before", () => move(-1)],
    Enter: ["open the rollout", () => (rollouts[current] ? (window.location.hash = rolloutLink(rollouts[current])) : false)],
  });
  const walked = useRef(false);
  useEffect(() => {
    if (walked.current) document.querySelector(".columns .current")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    walked.current = true;
  }, [current]);
  const rewards = rollouts.map((rollout) => rollout.reward).filter(Number.isFinite);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / Math.max(rewards.length, 1);
  const isEqual = rewards.every((reward) => reward === rewards[0]);
  const spread = isEqual ? 0 : Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / Math.max(rewards.length, 1));
  return html`<${Title} text=${`Group ${number} of step ${step}`} note=${html`${rollouts.length} rollouts of <a href=${taskLink(group.task)}>${group.task}</a>, mean reward ${formatNumber(mean, 3)}, spread ${formatNumber(spread, 3)}`} />
    ${rewards.length > 1 && spread === 0 && html`<p class="notice mild">All rewards are equal: the group gives no signal unless the algorithm compares it with others.</p>`}
    ${group.answer && html`<p class="pale">reference answer <b class="mono">${printable(group.answer)}</b></p>`}
    <details class="section" open><summary>Prompt</summary><${Chat} rollout=${{ prompt_messages: group.prompt_messages, prompt_images: group.prompt_images }} runId=${run.id} /></details>
    ${rollouts.length === 0 && html`<${Empty}>The group has no rollouts.<//>`}
    <h2>Rollouts, the best first</h2>
    <ul class="columns" tabindex="0" aria-label="Rollouts, the best first">
      ${rollouts.map((rollout, index) => html`<${AnswerCard} key=${rollout.sample} rollout=${rollout} runId=${run.id} isCurrent=${index === current} onChoose=${() => setCurrent(index)} />`)}
    </ul>`;
}
