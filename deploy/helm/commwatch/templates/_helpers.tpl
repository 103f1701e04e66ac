{{- define "commwatch.name" -}}
{{- $default := .Release.Name }}
{{- if not (contains "commwatch" .Release.Name) }}{{ $default = printf "%s-commwatch" .Release.Name }}{{ end }}
{{- .Values.fullnameOverride | default $default | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "commwatch.labels" -}}
{{- $own := dict "app.kubernetes.io/name" "commwatch" "app.kubernetes.io/instance" (include "commwatch.name" .) }}
{{- merge $own .Values.commonLabels | toJson }}
{{- end }}

{{/* How Prometheus' operator gives each series its node, and labels of the node. */}}
{{- define "commwatch.relabelings" -}}
{{- $made := list (dict "sourceLabels" (list "__meta_kubernetes_pod_node_name") "targetLabel" "node") }}
{{- range $name, $label := .Values.nodeLabels }}
{{- $source := printf "__meta_kubernetes_node_label_%s" (regexReplaceAll "[^A-Za-z0-9_]" $name "_") }}
{{- $made = append $made (dict "sourceLabels" (list $source) "targetLabel" $label) }}
{{- end }}
{{- toJson $made }}
{{- end }}

{{/* The fields of the objects, as `commwatch manifest k8s` fills them. An empty field's lines are left out. */}}
{{- define "commwatch.fields" -}}
{{- $v := .Values }}
{{- $name := include "commwatch.name" . }}
{{- $fields := dict
  "name" $name
  "namespace" .Release.Namespace
  "labels" (include "commwatch.labels" . | fromJson)
  "image" (printf "%s:%s" $v.image.repository ($v.image.tag | default .Chart.AppVersion))
  "port" $v.port
  "uid" $v.user
  "gid" $v.group
  "monitoring" $v.monitoringNamespace
  "runtime_class" $v.runtimeClassName
  "resources" $v.resources
  "relabelings" (include "commwatch.relabelings" . | fromJsonArray)
  "attach_node" (not (empty $v.nodeLabels))
  "peers" $v.peers
}}
{{- with $v.token.existingSecret }}
{{- $_ := merge $fields (dict
  "token_secret" .
  "token_group" $v.group
  "token_folder" "/etc/commwatch-token"
  "token_file" "/etc/commwatch-token/token"
  "token_mode" 288
) }}
{{- end }}
{{- if eq $v.mode "sidecar" }}
{{- $claim := $v.history.existingClaim }}
{{- if $v.history.size }}{{ $claim = printf "%s-history" $name }}{{ end }}
{{- $_ := merge $fields (dict
  "job_name" (printf "%s-job" $name)
  "trainer_image" $v.trainer.image
  "trainer_command" $v.trainer.command
  "gpus" $v.trainer.gpus
  "history_claim" $claim
  "history_size" $v.history.size
  "state_volume" (ternary "" "state" (not (empty $claim)))
  "access_mode" $v.history.accessMode
) }}
{{- else }}
{{- if and $v.token.existingSecret (not $v.peers) }}
{{- $_ := set $fields "peers" (printf "dns+%s:%v" $name $v.port) }}
{{- end }}
{{- $_ := merge $fields (dict
  "host_network" $v.hostNetwork
  "node_field" "spec.nodeName"
  "dns_policy" (ternary "ClusterFirstWithHostNet" "" $v.hostNetwork)
  "peer_name" (ternary $name "" (not (empty $fields.peers)))
) }}
{{- end }}
{{- toJson $fields }}
{{- end }}
