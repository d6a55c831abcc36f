// Preact and htm, under one name.
export {
  html, render, createContext, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext, useErrorBoundary,
} from "../vendor/preact/preact_htm.js";
