{{/* Names and labels that several objects must agree on. All names are labels of DNS, also of a long or dotted release. */}}

{{- define "keepstep.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $release := .Release.Name | replace "." "-" | trunc 32 | trimSuffix "-" -}}
{{- contains .Chart.Name $release | ternary $release (printf "%s-%s" $release .Chart.Name) -}}
{{- end -}}
{{- end }}

{{- define "keepstep.webhook" -}}
{{ include "keepstep.name" . }}-webhook
{{- end }}

{{- define "keepstep.console" -}}
{{ include "keepstep.name" . }}-console
{{- end }}

{{/* What docs and people's own RoleBindings refer to. */}}
{{- define "keepstep.cluster-events" -}}
{{ include "keepstep.name" . }}-cluster-events
{{- end }}

{{/* Short, because a CronJob's name has at most 52 characters. */}}
{{- define "keepstep.certificates" -}}
{{ include "keepstep.name" . }}-certs
{{- end }}

{{/* What the webhook serves with. Another one with cert-manager, so that a change between the two deletes no Secret that is
in use. */}}
{{- define "keepstep.secret" -}}
{{ include "keepstep.webhook" . }}-{{ ternary "tls" "certificates" .Values.certManager.enabled }}
{{- end }}

{{- define "keepstep.certificates-selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: certificates
{{- end }}

{{/* The pod of the Jobs that make and renew the webhook's certificate. */}}
{{- define "keepstep.certificates-pod" -}}
metadata:
  labels:
    {{- merge (include "keepstep.certificates-selector" . | fromYaml) .Values.podLabels | toYaml | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "keepstep.certificates" . }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    seccompProfile:
      type: RuntimeDefault
  nodeSelector:
    {{- merge (dict "kubernetes.io/os" "linux") .Values.nodeSelector | toYaml | nindent 4 }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: certificates
      image: {{ include "keepstep.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - certificates
        - --namespace={{ .Release.Namespace }}
        - --service={{ include "keepstep.webhook" . }}
        - --secret={{ include "keepstep.secret" . }}
        - --configuration={{ include "keepstep.name" . }}
      resources:
        requests:
          cpu: 100m
          memory: 128Mi
        limits:
          memory: 128Mi
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
{{- end }}

{{- define "keepstep.image" -}}
{{- $repository := required "image.repository is missing; hint: --set image.repository=… says where the cluster's nodes pull Keepstep's image from, see Dockerfile.agent" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "keepstep.openshift" -}}
{{- if kindIs "bool" .Values.injection.openshift -}}
{{ .Values.injection.openshift }}
{{- else -}}
{{ .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- end -}}
{{- end }}

{{- define "keepstep.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "keepstep.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: webhook
{{- end }}

{{- define "keepstep.console-selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: console
{{- end }}

{{- define "keepstep.console-labels" -}}
{{- merge (include "keepstep.console-selector" . | fromYaml) (include "keepstep.labels" . | fromYaml) | toYaml }}
{{- end }}

{{/* A selector of the namespaces whose pods may be injected. */}}
{{- define "keepstep.namespaces" -}}
{{- with .Values.webhook.namespaceSelector.matchLabels }}
matchLabels:
  {{- toYaml . | nindent 2 }}
{{- end }}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- concat (list .Release.Namespace "kube-system") .Values.webhook.excludedNamespaces | uniq | toYaml | nindent 6 }}
  {{- with .Values.webhook.namespaceSelector.matchExpressions }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
