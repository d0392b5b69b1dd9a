# Installs Firebrick on Windows: downloads the archive of a release, checks its SHA-256, unpacks it, and puts its folder into the
# user's PATH. Needs Windows 10 or newer; no administrator. A release has a copy that knows its repository.
#
#   FIREBRICK_VERSION     the release, such as 0.1.0; the newest if it is not set
#   FIREBRICK_HOME        where archives are unpacked; .firebrick in the user's folder if it is not set
#   FIREBRICK_REPOSITORY  OWNER/NAME on GitHub, for a copy of this file that is not from a release
#   FIREBRICK_DOWNLOAD    an address or a folder that has SHA256SUMS and the archives, instead of GitHub
#
# Trade-off: a link to a program needs administrator rights, so PATH gets the folder `current`, a junction to the newest version.
$ErrorActionPreference = "Stop"
# Without it, downloads are many times slower in Windows PowerShell 5.
$ProgressPreference = "SilentlyContinue"

# The release workflow puts its repository between the quotes.
$repository = ""
if ($env:FIREBRICK_REPOSITORY) { $repository = $env:FIREBRICK_REPOSITORY }

function Get-DownloadAddress {
    if ($env:FIREBRICK_DOWNLOAD) { return $env:FIREBRICK_DOWNLOAD }
    if (-not $repository) { throw "which repository? Set FIREBRICK_REPOSITORY to OWNER/NAME, or take the install.ps1 of a release" }
    if ($env:FIREBRICK_VERSION) {
        return "https://github.com/$repository/releases/download/v$($env:FIREBRICK_VERSION -replace '^v', '')"
    }
    return "https://github.com/$repository/releases/latest/download"
}

function Get-ReleaseFile([string]$From, [string]$To) {
    if ($From -match '^https?://') {
        Invoke-WebRequest -UseBasicParsing -Uri $From -OutFile $To
    } else {
        Copy-Item -Path $From -Destination $To
    }
}

function Install-Firebrick {
    if (-not [Environment]::Is64BitOperatingSystem -or $env:PROCESSOR_ARCHITECTURE -eq "ARM64") {
        throw "there is no archive for this processor: build from the sources, as README.md says"
    }
    $target = "x86_64-pc-windows-msvc"
    $home_folder = if ($env:FIREBRICK_HOME) { $env:FIREBRICK_HOME } else { Join-Path $env:USERPROFILE ".firebrick" }
    $from = Get-DownloadAddress
    $work = Join-Path $home_folder (".install-" + [Guid]::NewGuid().ToString("N"))
    New-Item -ItemType Directory -Force -Path $work | Out-Null
    try {
        # The list of checksums says what the archive is called, version included.
        $sums = Join-Path $work "SHA256SUMS"
        Get-ReleaseFile "$from/SHA256SUMS" $sums
        $version = if ($env:FIREBRICK_VERSION) { [Regex]::Escape(($env:FIREBRICK_VERSION -replace '^v', '')) } else { "[0-9][^ /]*" }
        $pattern = "^([0-9a-f]{64}) [ *](firebrick-$version-$([Regex]::Escape($target))\.tar\.gz)$"
        $found = @(Get-Content $sums | Where-Object { $_ -match $pattern })
        if ($found.Count -eq 0) { throw "the release at $from has no archive for $target of the requested version" }
        if ($found.Count -gt 1) { throw "$from has several versions: set FIREBRICK_VERSION" }
        $null = $found[0] -match $pattern
        $expected, $archive = $Matches[1], $Matches[2]
        $name = $archive -replace '\.tar\.gz$', ''

        Write-Host "getting $archive"
        $packed = Join-Path $work $archive
        Get-ReleaseFile "$from/$archive" $packed
        $sum = (Get-FileHash -Algorithm SHA256 -Path $packed).Hash.ToLowerInvariant()
        if ($sum -ne $expected) {
            throw "$archive is damaged or not the one that was published: SHA-256 $sum, expected $expected"
        }

        # The tar that comes with Windows; another one in PATH may take C: for the name of a machine.
        & (Join-Path $env:SystemRoot "System32\tar.exe") -xzf $packed -C $work
        if ($LASTEXITCODE -ne 0) { throw "could not unpack $archive" }
        $unpacked = Join-Path $work $name
        if (-not (Test-Path (Join-Path $unpacked "firebrick.exe"))) { throw "$archive has no program $name\firebrick.exe" }
        $folder = Join-Path $home_folder $name
        if (Test-Path $folder) { Remove-Item -Recurse -Force $folder }
        Move-Item $unpacked $folder

        $current = Join-Path $home_folder "current"
        # Removes the junction alone, not what it leads to.
        if (Test-Path $current) { [IO.Directory]::Delete($current) }
        New-Item -ItemType Junction -Path $current -Target $folder | Out-Null
    } finally {
        Remove-Item -Recurse -Force $work
    }

    Write-Host "firebrick is in $folder"
    $path = [Environment]::GetEnvironmentVariable("Path", "User")
    if (($path -split ";") -notcontains $current) {
        $longer = (@($path, $current) | Where-Object { $_ }) -join ";"
        [Environment]::SetEnvironmentVariable("Path", $longer, "User")
        Write-Host "$current was added to your PATH: open a new terminal"
    }
    Write-Host "next:"
    Write-Host "  firebrick doctor                   # what is there: driver, libraries, GPU, disk, Hub"
    Write-Host "  firebrick train quickstart.toml    # a whole run, with nothing to download"
}

Install-Firebrick
