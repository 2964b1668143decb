{{- define "stepdial.name" -}}
{{- if contains "stepdial" .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-stepdial" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "stepdial.selector" -}}
app.kubernetes.io/name: stepdial
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stepdial.labels" -}}
{{ include "stepdial.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stepdial.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-gpu" "" .Values.gpu.enabled)) -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}

{{- define "stepdial.keysSecret" -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.toml -}}
{{- fail "apiKeys: set existingSecret or toml, not both" -}}
{{- end -}}
{{- if .Values.apiKeys.toml -}}
{{ include "stepdial.name" . }}-keys
{{- else -}}
{{ .Values.apiKeys.existingSecret }}
{{- end -}}
{{- end -}}

{{/* The volume behind /bundles; empty where the bundles are in the image. */}}
{{- define "stepdial.bundles" -}}
{{- with .Values.bundles -}}
{{- $sources := compact (list .claim .initImage .imageVolume) -}}
{{- if gt (len $sources) 1 -}}
{{- fail "bundles: set one of claim, initImage and imageVolume" -}}
{{- end -}}
{{- if and $sources (not .paths) -}}
{{- fail "bundles.paths: name the folders to serve, such as /bundles/my-model" -}}
{{- end -}}
{{- if .claim -}}
persistentVolumeClaim: {claimName: {{ .claim | quote }}, readOnly: true}
{{- else if .initImage -}}
emptyDir: {}
{{- else if .imageVolume -}}
image: {reference: {{ .imageVolume | quote }}, pullPolicy: {{ $.Values.image.pullPolicy }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "stepdial.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
