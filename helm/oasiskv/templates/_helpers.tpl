{{- define "oasiskv.name" -}}
{{- if contains "oasiskv" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-oasiskv{{ end }}-operator
{{- end }}

{{- define "oasiskv.account" -}}
{{- .Values.serviceAccount | default (include "oasiskv.name" .) }}
{{- end }}

{{- define "oasiskv.selector" -}}
app.kubernetes.io/name: oasiskv-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "oasiskv.labels" -}}
{{ include "oasiskv.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "oasiskv.image" -}}
{{ .image }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- /* What the operator needs in each namespace in which it makes services. */}}
{{- define "oasiskv.rules" -}}
- apiGroups: [oasiskv.io]
  resources: [oasiskvservices, oasiskvprofiles]
  verbs: [get, list, watch]
- apiGroups: [oasiskv.io]
  resources: [oasiskvservices/status]
  verbs: [patch, update]
# The owner references that it writes block the owner's deletion until the child is gone.
- apiGroups: [oasiskv.io]
  resources: [oasiskvservices/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [serving.kserve.io]
  resources: [inferenceservices]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
