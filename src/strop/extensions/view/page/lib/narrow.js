// Whether the window is narrow.
import { useEffect, useMemo, useState } from "./ui.js";

export function useNarrow() {
  const query = useMemo(() => window.matchMedia("(max-width: 760px)"), []);
  const [isNarrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const update = () => setNarrow(query.matches);
    query.addEventListener("change", update);
    return () => query.removeEventListener("change", update);
  }, []);
  return isNarrow;
}
