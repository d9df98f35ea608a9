{{/* Names and labels that several objects must agree on. All names are labels of DNS, also of a long or dotted release. */}}

{{- define "mooring.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $release := .Release.Name | replace "." "-" | trunc 32 | trimSuffix "-" -}}
{{- contains .Chart.Name $release | ternary $release (printf "%s-%s" $release .Chart.Name) -}}
{{- end -}}
{{- end }}

{{- define "mooring.webhook" -}}
{{ include "mooring.name" . }}-webhook
{{- end }}

{{- define "mooring.console" -}}
{{ include "mooring.name" . }}-console
{{- end }}

{{/* What docs and people's own RoleBindings refer to. */}}
{{- define "mooring.cluster-events" -}}
{{ include "mooring.name" . }}-cluster-events
{{- end }}

{{/* Of the webhook that makes its own certificates. Another one than cert-manager's, so that a change between the two
deletes no Secret that is in use. */}}
{{- define "mooring.self-managed-secret" -}}
{{ include "mooring.webhook" . }}-certificates
{{- end }}

{{- define "mooring.cert-manager-secret" -}}
{{ include "mooring.webhook" . }}-tls
{{- end }}

{{- define "mooring.image" -}}
{{- $repository := required "image.repository is missing; hint: --set image.repository=… says where the cluster's nodes pull Mooring's image from, see Dockerfile.agent" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "mooring.openshift" -}}
{{- if kindIs "bool" .Values.injection.openshift -}}
{{ .Values.injection.openshift }}
{{- else -}}
{{ .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- end -}}
{{- end }}

{{- define "mooring.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "mooring.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: webhook
{{- end }}

{{- define "mooring.console-selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: console
{{- end }}

{{- define "mooring.console-labels" -}}
{{- merge (include "mooring.console-selector" . | fromYaml) (include "mooring.labels" . | fromYaml) | toYaml }}
{{- end }}
