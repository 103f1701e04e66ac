// What Grafana's own schema says of a dashboard of ours: the panels' options and fields by the type of the panel.
import type { AnnotationQuery, Dashboard, DataQuery, Panel, RowPanel } from '@grafana/schema';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as statetimeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// In JSON an enum is one of its texts.
type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
// Grafana fills in what is left out.
type Some<T> = T extends unknown[] ? T : T extends object ? { [K in keyof T]?: Some<T[K]> } : T;
type Query = DataQuery & { expr: string; format?: string; instant?: boolean; range?: boolean; legendFormat?: string; interval?: string };
type Fields<C> = Omit<NonNullable<Panel['fieldConfig']>, 'defaults'> & { defaults: Omit<NonNullable<Panel['fieldConfig']>['defaults'], 'custom'> & { custom?: Some<C> } };
type Of<T extends string, O, C> = Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & { type: T; targets: Query[]; options?: Some<O>; fieldConfig?: Fields<C> };
type Known =
  | RowPanel
  | Of<'heatmap', heatmap.Options, heatmap.FieldConfig>
  | Of<'stat', stat.Options, never>
  | Of<'state-timeline', statetimeline.Options, statetimeline.FieldConfig>
  | Of<'table', table.Options, table.FieldConfig>
  | Of<'timeseries', timeseries.Options, timeseries.FieldConfig>;
type Annotations = { list: (Omit<AnnotationQuery, 'target'> & { target: Query; expr: string; titleFormat: string; textFormat: string; tagKeys: string })[] };
export type Ours = Json<Omit<Dashboard, 'panels' | 'annotations'> & { panels: Known[]; annotations?: Annotations }>;
