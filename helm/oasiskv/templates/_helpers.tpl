{{- define "oasiskv.prefix" -}}
{{- if contains "oasiskv" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-oasiskv{{ end }}
{{- end }}

{{- define "oasiskv.name" -}}
{{ include "oasiskv.prefix" . }}-operator
{{- end }}

{{- define "oasiskv.account" -}}
{{- .Values.serviceAccount | default (include "oasiskv.name" .) }}
{{- end }}

{{- define "oasiskv.selector" -}}
app.kubernetes.io/name: oasiskv-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "oasiskv.redis.selector" -}}
app.kubernetes.io/name: oasiskv-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Labels of what is neither the operator's pod nor Redis's. */}}
{{- define "oasiskv.common" -}}
app.kubernetes.io/part-of: oasiskv
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "oasiskv.labels" -}}
{{ include "oasiskv.selector" . }}
{{ include "oasiskv.common" . }}
{{- end }}

{{- define "oasiskv.image" -}}
{{ .image }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "oasiskv.operator.image" -}}
{{- $tag := .Values.operator.tag | default .Chart.AppVersion }}
{{- include "oasiskv.image" (dict "image" .Values.operator.image "tag" $tag "digest" .Values.operator.digest) }}
{{- end }}

{{- /* Of every pod here: the restricted level. */}}
{{- define "oasiskv.pod" -}}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "oasiskv.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Of the pods that run the operator's image. */}}
{{- define "oasiskv.operator.pod" -}}
{{ include "oasiskv.pod" . }}
{{- with .Values.operator.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.operator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* A pod that fails unless every one of `urls` answers with 2xx. */}}
{{- define "oasiskv.test" -}}
restartPolicy: Never
activeDeadlineSeconds: 120
automountServiceAccountToken: false
{{ include "oasiskv.operator.pod" .root }}
containers:
  - name: test
    image: {{ include "oasiskv.operator.image" .root }}
    imagePullPolicy: {{ .root.Values.operator.pullPolicy }}
    command:
      - python
      - -c
      - |
        import sys, urllib.request
        for url in sys.argv[1:]:
            with urllib.request.urlopen(url, timeout=30) as answer:
                print(url, answer.status)
    args: {{- toYaml .urls | nindent 6 }}
    resources:
      requests: {cpu: 50m, memory: 64Mi}
      limits: {cpu: 500m, memory: 128Mi}
    {{- include "oasiskv.container" . | nindent 4 }}
{{- end }}

{{- define "oasiskv.redis.url" -}}
{{- if .Values.redis.enabled }}redis://{{ include "oasiskv.prefix" . }}-redis.{{ .Release.Namespace }}.svc:6379/0{{ else }}{{ .Values.redis.url }}{{ end }}
{{- end }}

{{- /* Three quarters of its memory, in megabytes. */}}
{{- define "oasiskv.redis.maxmemory" -}}
{{- $size := .Values.redis.memory }}
{{- $mebi := trimSuffix "Mi" $size | int }}
{{- if hasSuffix "Gi" $size }}{{ $mebi = mul 1024 (trimSuffix "Gi" $size | int) }}{{ end }}
{{- div (mul 3 $mebi) 4 }}mb
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
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Which of several operators works in a namespace.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [oasiskv-services]
  verbs: [get, update, delete]
# A decision that is told once more counts on the event that is there.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [get, create, patch]
{{- end }}

{{- /* Fails on the first field of a spec that its definition does not know; an API server would drop it with a warning. */}}
{{- define "oasiskv.known" -}}
{{- $path := .path }}
{{- if kindIs "map" .value }}
{{- with .schema.properties }}
{{- $known := . }}
{{- range $key, $value := $.value }}
{{- if not (hasKey $known $key) }}
{{- fail (printf "%s.%s: expected one of %s" $path $key (keys $known | sortAlpha | join ", ")) }}
{{- end }}
{{- include "oasiskv.known" (dict "schema" (get $known $key) "value" $value "path" (printf "%s.%s" $path $key)) }}
{{- end }}
{{- end }}
{{- else if kindIs "slice" .value }}
{{- range $index, $value := .value }}
{{- include "oasiskv.known" (dict "schema" $.schema.items "value" $value "path" (printf "%s[%d]" $path $index)) }}
{{- end }}
{{- end }}
{{- end }}
